"""The table of rewards by name, and the parsing of ``NAME[:ARG]``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from specjax._util.errors import OptionError, errors_as
from specjax.rewards.classifier import Classifier
from specjax.rewards.combined import Combined
from specjax.rewards.length import Length
from specjax.rewards.lexical import Forbidden, Lexical
from specjax.rewards.text import Json, OfFunction, Python, Regex, from_module

SHOWN_CHARACTERS = 80  # of an argument in an error message


def _words(argument: str) -> tuple[str, ...]:
    if not argument:
        return ()
    return tuple(word.strip() for word in argument.split(","))


def _length(argument: str) -> Length:
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", argument)
    if match:
        low = int(match[1])
        high = int(match[2] or match[1])
        if high >= max(low, 1):
            return Length(low, high)
    raise OptionError(
        f"--reward length:{argument}: expected LOW-HIGH or N, in tokens, such as length:20-40"
    )


def _regex(argument: str) -> Regex:
    if not argument:
        raise OptionError("--reward regex: expected a pattern, such as regex:return .*")
    with errors_as(f"--reward regex:{argument[:SHOWN_CHARACTERS]}: not a pattern", OptionError):
        return Regex(re.compile(argument))


def _classifier(argument: str) -> Classifier:
    if not argument:
        raise OptionError("--reward classifier: expected a directory, as in classifier:DIR")
    return Classifier(argument)


# name → (its argument and meaning, a function that makes it from the argument)
REWARDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "lexical": (
        "[WORD,…] share of the words that occur; =WORD: that spelling alone",
        lambda argument: Lexical(_words(argument)),
    ),
    "forbidden": (
        "[WORD,…] share of the words that do not occur",
        lambda argument: Forbidden(_words(argument)),
    ),
    "length": ("LOW-HIGH tokens", _length),
    "regex": ("PATTERN is found in the completion", _regex),
    "json": ("the completion is JSON, or begins one", lambda argument: Json()),
    "python": ("the completion parses", lambda argument: Python()),
    "classifier": ("DIR of a transformers sequence classifier", _classifier),
}


def make_reward(text: str) -> Any:
    """The reward of ``NAME[:ARG]`` or ``module:function``.

    Raises:
      OptionError: an unknown name, or an argument that it cannot use.
    """
    name, _, argument = text.partition(":")
    if name in REWARDS:
        if argument and name in ("json", "python"):
            raise OptionError(f"--reward {text}: {name} takes no argument")
        return REWARDS[name][1](argument)
    if argument and re.fullmatch(r"[\w.]+", name) and argument.isidentifier():
        return from_module(text)
    raise OptionError(f"unknown reward {text!r}; known: {', '.join(REWARDS)}, and module:function")


def combine(rewards: Any, product: bool = False) -> Combined:
    """One reward from one or several names, :class:`specjax.rewards.Reward` objects or functions.

    A :class:`Combined` stays as it is, except for ``product``.

    Raises:
      OptionError: there is no reward, or a value that cannot score.
    """
    if isinstance(rewards, Combined):
        return dataclasses.replace(rewards, product=product)
    if isinstance(rewards, str) or not isinstance(rewards, Sequence):
        rewards = [rewards]
    parts = [_as_reward(reward) for reward in rewards]
    if not parts:
        raise OptionError("reward=[] holds no reward")
    return Combined(tuple(parts), product)


def _as_reward(reward: Any) -> Any:
    if isinstance(reward, str):
        return make_reward(reward)
    if hasattr(reward, "score") and hasattr(reward, "on_device"):
        return reward
    if callable(reward):
        return OfFunction(reward, getattr(reward, "__name__", "reward"))
    raise OptionError(f"reward={reward!r}: expected a name, a callable or a specjax.rewards.Reward")
