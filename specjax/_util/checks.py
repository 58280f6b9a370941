"""What a value out of a file or an argument must be: types and ranges, in one vocabulary.

A :class:`Check` says in words what it wants; tables of them stand where the values are read.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specjax._util.errors import SpecjaxError

INT32_MAX = 2**31 - 1  # counts become int32 arrays
SEED_MAX = 2**32 - 1  # jax.random.key drops or refuses what is above
LARGEST = 1e30  # float32 holds it, and one over it


class Check(NamedTuple):
    """What a value must be, in words, and whether one is."""

    says: str
    holds: Callable[[Any], bool]


def whole(low: int = 1, high: int = INT32_MAX) -> Check:
    """An integer in a range."""
    return Check(
        f"a whole number from {low} to {high}", lambda x: type(x) is int and low <= x <= high
    )


def number(low: float, high: float = LARGEST, above: bool = False, below: bool = False) -> Check:
    """A finite number in a range; ``above`` and ``below`` leave its ends out."""
    first, last = "above" if above else "from", "and below" if below else "to"

    def holds(x: Any) -> bool:
        real = type(x) in (int, float)
        return real and (low < x if above else low <= x) and (x < high if below else x <= high)

    return Check(f"a number {first} {low:g} {last} {high:g}", holds)


POSITIVE = Check(
    f"a number above 0 (from {1 / LARGEST:g} to {LARGEST:g})", number(1 / LARGEST).holds
)
FROM_0 = number(0)
FLAG = Check("true or false", lambda x: type(x) is bool)
TEXT = Check("a text", lambda x: type(x) is str)
OBJECT = Check("an object", lambda x: type(x) is dict)


def one_of(*choices: str) -> Check:
    """One of some texts."""
    return Check(f"one of {', '.join(choices)}", lambda x: type(x) is str and x in choices)


def list_of(item: Check) -> Check:
    """A list of such values."""
    return Check(f"a list, each {item.says}", lambda x: type(x) is list and all(map(item.holds, x)))


def either(first: Check, second: Check) -> Check:
    """One or the other."""
    return Check(f"{first.says}, or {second.says}", lambda x: first.holds(x) or second.holds(x))


def require(holder: str, name: str, value: Any, check: Check, kind: type[SpecjaxError]) -> None:
    """Refuses a value in one line that names it and says what was expected."""
    if not check.holds(value):
        raise kind(f"{holder}{name} is {quoted(value)}, expected {check.says}")


def require_all(
    holder: str, values: Mapping[str, Any], table: Mapping[str, Check], kind: type[SpecjaxError]
) -> None:
    """:func:`require` of every value that the table knows; null counts as absent."""
    for name in table.keys() & values.keys():
        if values[name] is not None:
            require(holder, name, values[name], table[name], kind)


def quoted(value: Any) -> str:
    """A value of any size and depth, short enough for a message."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python does not write integers of thousands of digits
        return "a very long integer"
