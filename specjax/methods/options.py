"""Options of a method's parts: their types, defaults and ranges."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable
from typing import Any

from specjax.errors import OptionError

REQUIRED = object()  # in place of a default


def branching(value: Any) -> tuple[int, ...]:
    """Children per level, from ``"4,2,2"`` or a sequence of numbers."""
    parts = value.split(",") if isinstance(value, str) else value
    counts = tuple(int(part) for part in parts)
    if not counts or min(counts) < 1:
        raise ValueError
    return counts


_WANTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    branching: "children per level, each at least 1, such as 4,2,2",
}


@dataclasses.dataclass(frozen=True)
class Option:
    """One setting of a part. Floats are arrays in the loop (changing one never recompiles);
    everything else is static."""

    kind: Callable[[Any], Any]
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    above: float | None = None  # as low, itself excluded
    below: float | None = None
    choices: tuple[str, ...] = ()
    within_vocabulary: bool = False  # so many different tokens: no more than there are

    def parse(self, name: str, value: Any) -> Any:
        """The value, from a string or from Python, checked.

        Raises:
          OptionError: a wrong type, a value out of range, or none.
        """
        if value is REQUIRED:
            raise OptionError(f"option {name} has no default: give options={{{name!r}: …}}")
        try:
            if self.kind is bool and isinstance(value, str):
                parsed = {"true": True, "false": False}[value.lower()]
            elif self.kind is int and not isinstance(value, str) and value != int(value):
                raise ValueError
            else:
                parsed = self.kind(value)
        except (ValueError, TypeError, KeyError):
            wanted = _WANTED.get(self.kind, "another value")
            raise OptionError(f"{name}={value}: expected {wanted}") from None
        for bound, sign, holds in (
            (self.low, "≥", lambda x, y: x >= y),
            (self.above, ">", lambda x, y: x > y),
            (self.high, "≤", lambda x, y: x <= y),
            (self.below, "<", lambda x, y: x < y),
        ):
            if bound is not None and not holds(parsed, bound):
                raise OptionError(f"{name}={value}: expected a number {sign} {bound}")
        if self.choices and parsed not in self.choices:
            raise OptionError(f"{name}={value}: expected one of {', '.join(self.choices)}")
        return parsed

    def check_vocabulary(self, name: str, value: Any, vocab: int) -> None:
        """Refuses more different tokens than the vocabulary has.

        Raises:
          OptionError: so.
        """
        widest = max(value) if isinstance(value, tuple) else value
        if self.within_vocabulary and widest > vocab:
            raise OptionError(f"{name}={widest} is more than the vocabulary's {vocab} tokens")


def hint(name: str, known: Iterable[str]) -> str:
    """What to write instead of an unknown name."""
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(known)}" if known else "; it has none"
