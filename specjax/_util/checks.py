"""What a value must be: one class for arguments, options and values out of files.

An argument is converted where its meaning is clear: ``"4"``, ``4.0`` and ``np.int64(4)`` are 4.
A value out of a file is not converted: its type must be exact. Either way the error is one line
with the value's name, the value and what was expected.

:mod:`specjax._util.arguments` builds the checks of arguments. Those of files' values are here.
"""

from __future__ import annotations

import dataclasses
import numbers
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from specjax._util.errors import OptionError, SpecjaxError

INT32_MAX = 2**31 - 1  # counts become int32 arrays
SEED_MAX = 2**64 - 1  # what a key holds
LARGEST = 1e30  # float32 holds it, and its reciprocal
SHOWN_CHARACTERS = 60  # of a value in a message

_KIND_NAMES = {int: "a whole number", float: "a number", bool: "true or false"}
_BOOLEANS = {"true": True, "false": False, True: True, False: False}
# What a conversion raises for a value that it cannot convert.
_CONVERSION_ERRORS = (ValueError, TypeError, KeyError, OverflowError)


@dataclasses.dataclass(frozen=True)
class Check:
    """What one value must be.

    Attributes:
      kind: makes the value of what was given, or raises ValueError or TypeError. It may be one of
        Python's types; ``int``, ``float`` and ``bool`` accept only what means such a value.
      expected: the expectation in words. Left out, it follows from the kind and the bounds.
      low, high: bounds that are included.
      above, below: bounds that are excluded.
      choices: the only values, if there are any.
      words: texts that are accepted unconverted, whatever the rest says.
      fits: one more condition on the converted value.
      optional: whether None is accepted.
    """

    kind: Callable[[Any], Any]
    _: dataclasses.KW_ONLY
    expected: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    fits: Callable[[Any], Any] = lambda value: True
    optional: bool = False

    def parse(self, name: str, value: Any) -> Any:
        """The converted value.

        Raises:
          OptionError: a wrong type, or a value out of range.
        """
        try:
            return self.convert(value)
        except _CONVERSION_ERRORS:
            raise OptionError(
                f"{name}={format_value(value)}: expected {self.description}"
            ) from None

    def holds(self, value: Any) -> bool:
        """Whether the value is as expected."""
        try:
            self.convert(value)
        except _CONVERSION_ERRORS:
            return False
        return True

    def convert(self, value: Any) -> Any:
        """The converted value.

        Raises:
          ValueError, TypeError, KeyError, OverflowError: it is not as expected.
        """
        if value is None and self.optional:
            return None
        if isinstance(value, str) and value in self.words:
            return value
        converted = self._convert_kind(value)
        if not (self.fits(converted) and self._in_bounds(converted)):
            raise ValueError
        if self.choices and converted not in self.choices:
            raise ValueError
        return converted

    @property
    def description(self) -> str:
        """The expectation in words."""
        if self.expected:
            text = self.expected
        elif self.choices:
            text = f"one of {', '.join(self.choices)}"
        else:
            text = _KIND_NAMES.get(self.kind, "another value") + self._bounds_text()
        return " or ".join((text, *self.words))

    def _convert_kind(self, value: Any) -> Any:
        if self.kind is bool:
            key = value.lower() if isinstance(value, str) else value
            return _BOOLEANS[key]
        if self.kind in (int, float) and _is_no_number(value):
            raise TypeError
        if self.kind is int and not isinstance(value, str) and value != int(value):
            raise ValueError
        return self.kind(value)

    def _in_bounds(self, value: Any) -> bool:
        # NaN fails every one of these comparisons, so it is refused where there is a bound.
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def _bounds_text(self) -> str:
        """`` from 1 to 64``, `` ≥ 1`` or `` > 0 and ≤ 1``."""
        if self.low is not None and self.high is not None:
            return f" from {_format_bound(self.low)} to {_format_bound(self.high)}"
        bounds = {">": self.above, "≥": self.low, "<": self.below, "≤": self.high}
        texts = [
            f"{sign} {_format_bound(bound)}" for sign, bound in bounds.items() if bound is not None
        ]
        if not texts:
            return ""
        return " " + " and ".join(texts)


def _is_no_number(value: Any) -> bool:
    """Whether Python might convert it to a number though it means none: True, bytes, an array."""
    if isinstance(value, (bool, bytes)) or getattr(value, "ndim", 0):
        return True
    # NumPy's bool. NumPy is not imported for it: that takes a third of what --help takes.
    return str(getattr(value, "dtype", "")) == "bool"


def _format_bound(bound: float) -> str:
    if isinstance(bound, int):
        return str(bound)
    return f"{bound:g}"


def exactly(*types: type) -> Callable[[Any], Any]:
    """A ``Check.kind`` that accepts values of exactly these types: True is not of type ``int``."""

    def kind(value: Any) -> Any:
        if type(value) not in types:
            raise TypeError
        return value

    return kind


def satisfying(expected: str, holds: Callable[[Any], bool]) -> Check:
    """The check of a condition, which ``expected`` says in words."""
    return Check(lambda value: value, expected=expected, fits=holds)


def whole(low: int = 1, high: int = INT32_MAX) -> Check:
    """An integer in a range, both ends included."""
    return Check(exactly(int), expected=f"a whole number from {low} to {high}", low=low, high=high)


def number(low: float, high: float = LARGEST, above: bool = False, below: bool = False) -> Check:
    """A finite number in a range; ``above`` and ``below`` exclude its ends."""
    first = "above" if above else "from"
    last = "and below" if below else "to"
    check = Check(exactly(int, float), expected=f"a number {first} {low:g} {last} {high:g}")
    if above:
        check = dataclasses.replace(check, above=low)
    else:
        check = dataclasses.replace(check, low=low)
    if below:
        return dataclasses.replace(check, below=high)
    return dataclasses.replace(check, high=high)


POSITIVE = dataclasses.replace(
    number(1 / LARGEST), expected=f"a number above 0 (from {1 / LARGEST:g} to {LARGEST:g})"
)
FROM_0 = number(0)
FLAG = Check(exactly(bool), expected="true or false")
TEXT = Check(exactly(str), expected="a text")
OBJECT = Check(exactly(dict), expected="an object")


def one_of(*choices: str) -> Check:
    """One of some texts."""
    return Check(exactly(str), choices=choices)


def list_of(item: Check) -> Check:
    """A list of such values."""
    return Check(
        exactly(list),
        expected=f"a list, each {item.description}",
        fits=lambda values: all(map(item.holds, values)),
    )


def either(first: Check, second: Check) -> Check:
    """One or the other."""
    return satisfying(
        f"{first.description}, or {second.description}",
        lambda value: first.holds(value) or second.holds(value),
    )


def require(
    holder: str, name: str, value: Any, check: Check, error_type: type[SpecjaxError]
) -> None:
    """Checks a value out of a file.

    ``holder`` is what the message says before the name, such as ``config.json: ``.

    Raises:
      error_type: the value is not as expected.
    """
    if not check.holds(value):
        raise error_type(f"{holder}{name} is {quoted(value)}, expected {check.description}")


def require_all(
    holder: str,
    values: Mapping[str, Any],
    table: Mapping[str, Check],
    error_type: type[SpecjaxError],
) -> None:
    """:func:`require` of every value that the table has a check for; null counts as absent."""
    for name in table.keys() & values.keys():
        if values[name] is not None:
            require(holder, name, values[name], table[name], error_type)


def quoted(value: Any) -> str:
    """A value as Python writes it, cut to a message's length whatever its size and depth."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python does not write integers of thousands of digits
        return "a very long integer"


def format_value(value: Any) -> str:
    """A value in one line of a message: texts without quotes, arrays and models by their types."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    if _is_plain(value):
        line = " ".join(str(value).split())
        if len(line) > SHOWN_CHARACTERS:
            line = line[:SHOWN_CHARACTERS] + "…"
        return line
    if isinstance(value, (list, tuple)) and all(map(_is_plain, value)):
        return reprlib.repr(value)
    return type(value).__name__


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, numbers.Number, type(None)))
