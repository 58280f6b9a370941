"""Rewards that read text, on the host: ``regex``, ``json``, ``python``, any Python function."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

from specjax._util.arguments import instance_of, validate_fields
from specjax._util.checks import Check
from specjax._util.errors import OptionError, errors_as
from specjax.rewards.parsing import OPEN, VALID, json_state, parses_as_python


class OfText:
    """What text rewards share: they need a tokenizer, and never run on the device."""

    name: str
    bounds: tuple[float, float] | None = (0.0, 1.0)
    full = 1.0

    def check(self, tokenizer, constraints):
        if tokenizer is None:
            raise OptionError(f"reward {self.name} reads text: it needs a target with a tokenizer")

    def on_device(self, tokenizer, constraints):
        return None


@dataclasses.dataclass(frozen=True)
class Regex(OfText):
    """1 where the pattern is found in the completion, else 0."""

    pattern: re.Pattern
    name = "regex"

    def __post_init__(self):
        validate_fields(
            self, pattern=Check(instance_of(re.Pattern), expected="a pattern of re.compile")
        )

    def score(self, sample):
        """1 if the pattern occurs in the text, else 0."""
        return float(self.pattern.search(sample.text) is not None)


@dataclasses.dataclass(frozen=True)
class Json(OfText):
    """1 for a completion that is valid JSON, 0.5 for the beginning of one, else 0.

    A beginning that is followed by an end of sequence scores 0.
    """

    name = "json"

    def score(self, sample):
        """1 for valid JSON, 0.5 for the beginning of some, else 0."""
        state = json_state(sample.text)
        if state == VALID:
            return 1.0
        if state == OPEN and not sample.ended:
            return 0.5
        return 0.0


@dataclasses.dataclass(frozen=True)
class Python(OfText):
    """1 where prompt and completion parse as Python, perhaps after open blocks are closed.

    Only the prompt's last ``def`` or ``class`` and what follows is parsed; see
    :func:`specjax.rewards.parsing.parses_as_python`.
    """

    name = "python"

    def score(self, sample):
        """1 if the text parses as Python, else 0."""
        return float(parses_as_python(sample.prompt, sample.text))


@dataclasses.dataclass(frozen=True)
class OfFunction(OfText):
    """Any Python function of (completion, prompt), or of the completion alone."""

    function: Callable[..., Any]
    name: str
    bounds = None
    full = 1.0

    def score(self, sample):
        """What the function returns for this completion."""
        if _accepts_two(self.function):
            return self.function(sample.text, sample.prompt)
        return self.function(sample.text)


def from_module(place: str) -> OfFunction:
    """The reward of ``module:function``.

    Raises:
      OptionError: no such module or function, or it cannot be called.
    """
    module, _, name = place.partition(":")
    with errors_as(f"--reward {place}: module {module} cannot be imported", OptionError):
        function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise OptionError(f"--reward {place}: module {module} has no function {name!r}")
    return OfFunction(function, place)


def _accepts_two(function: Callable) -> bool:
    """Whether a function can be called with two positional arguments."""
    try:
        inspect.signature(function).bind("", "")
    except (TypeError, ValueError):  # another signature, or a builtin without one
        return False
    return True
