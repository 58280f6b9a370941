"""The sampling settings beside temperature, top-k and top-p on a command line, by vLLM's names.

One table makes the options of ``infer.run`` and ``infer.bench``. What a setting does is in
:class:`specjax.Sampling` and docs/sampling.md.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax._util.command_line import checked
from specjax._util.errors import OptionError
from specjax._util.sampling_checks import CHECKS, LARK, SCHEMA

if TYPE_CHECKING:  # a tokenizer loads JAX, and arguments are parsed before that
    from specjax.text.tokenizer import Tokenizer


def _list(text: str) -> list[str]:
    return text.split(",")


def _biases(text: str) -> list[list[str]]:
    """``ID:BIAS,…`` as pairs."""
    return [part.split(":") for part in _list(text)]


def _read_grammar(text: str) -> str:
    """A grammar with the contents of its file, where it names one."""
    for form in (SCHEMA, LARK):
        if text.startswith(form):
            path = Path(text.removeprefix(form))
            try:
                return form + path.read_text()
            except OSError as error:
                raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    return text


@dataclasses.dataclass(frozen=True)
class Setting:
    """An option: how its text is split, its place holder and its help."""

    metavar: str
    help: str
    split: Callable[[str], Any] = str


SETTINGS = {
    "min_p": Setting("P", "keep tokens with P times the likeliest one's probability"),
    "typical_p": Setting("P", "keep the tokens closest to the entropy, up to mass P"),
    "epsilon_cutoff": Setting("P", "keep tokens of probability P or more"),
    "eta_cutoff": Setting("P", "as --epsilon-cutoff, less where the entropy is high"),
    "top_n_sigma": Setting("N", "keep logits within N standard deviations of the largest"),
    "repetition_penalty": Setting("X", "divides logits of tokens in the text; 1 is off"),
    "presence_penalty": Setting("X", "subtracted from logits of tokens written so far"),
    "frequency_penalty": Setting("X", "as --presence-penalty, for each time"),
    "no_repeat_ngram_size": Setting("N", "no N tokens in a row twice"),
    "dry_multiplier": Setting("X", "strength of the DRY penalty of repetitions; 0 is off"),
    "dry_base": Setting("X", "its growth per token of the repetition (default: 1.75)"),
    "dry_allowed_length": Setting("N", "length of repetitions without penalty (default: 2)"),
    "dry_sequence_breakers": Setting("ID,…", "tokens that end a repetition", _list),
    "logit_bias": Setting("ID:X,…", "added to the logits of these tokens", _biases),
    "allowed_token_ids": Setting("ID,…", "the only tokens", _list),
    "suppress_tokens": Setting("ID,…", "tokens that are never written", _list),
    "min_tokens": Setting("N", "no end of sequence before N new tokens"),
    "stop_token_ids": Setting("ID,…", "further tokens that end a completion", _list),
    "grammar": Setting(
        "GRAMMAR",
        "what the text must be: json, schema:FILE, regex:EXPRESSION or lark:FILE",
        _read_grammar,
    ),
    "exponential_decay_length_penalty": Setting(
        "START,X", "after START tokens ends of sequence become likelier, by X per token", _list
    ),
}


def add_settings(group: argparse._ActionsContainer) -> None:
    """Adds an option per setting, ``--ignore-eos`` and ``--bad-words``."""
    for name, setting in SETTINGS.items():
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=_parser(name, setting),
            metavar=setting.metavar,
            help=f"{setting.help}",
        )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        default=None,
        help="go on after an end of sequence, to the longest completion",
    )
    group.add_argument(
        "--bad-words",
        action="append",
        type=checked(str, "a text that is not empty", str.strip),
        metavar="TEXT",
        help="never write this text; repeatable",
    )


def given_settings(args: argparse.Namespace, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Arguments of ``sj.Sampling`` that the command line gives."""
    names = (*SETTINGS, "ignore_eos")
    given = {name: vars(args)[name] for name in names if vars(args)[name] is not None}
    if args.bad_words:
        given["bad_words"] = word_ids(args.bad_words, tokenizer)
    return given


def word_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """The token ids of each word, at the beginning of a text and after a space, as vLLM.

    Raises:
      OptionError: there is no tokenizer, or a word is empty.
    """
    if tokenizer is None:
        raise OptionError("bad_words need a target with a tokenizer")
    found = []
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not word.strip() or not ids:
                raise OptionError("bad_words: expected texts, none of them empty")
            if ids not in found:
                found.append(ids)
    return found


def _parser(name: str, setting: Setting) -> Callable[[str], Any]:
    """An argparse type with the check of :class:`specjax.Sampling`."""

    def parse(text: str) -> Any:
        try:
            if not text:
                raise ValueError
            return CHECKS[name].convert(setting.split(text))
        except (ValueError, TypeError, KeyError, OverflowError):
            expected = CHECKS[name].description
            raise argparse.ArgumentTypeError(f"{text}: expected {expected}") from None

    return parse
