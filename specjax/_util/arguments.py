"""What arguments must be: a description per argument, in place of checks per function.

What can be meant works (``"4"``, ``4.0`` and ``np.int64(4)`` are 4); anything else is refused in
one line that names the argument, before anything compiles.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import numbers
import operator
import reprlib
from collections.abc import Callable, Mapping, Set
from typing import Any, TypeVar

import numpy as np

from specjax._util.errors import OptionError

Function = TypeVar("Function", bound=Callable[..., Any])

_WANTED = {int: "a whole number", float: "a number", bool: "true or false"}
_TRUTH = {"true": True, "false": False, True: True, False: False}
MOST_NODES = 4096  # of a tree: masks are its square, and memory must hold them
SHOWN = 60  # characters of a value that a message shows


@dataclasses.dataclass(frozen=True)
class ArgSpec:
    """What one argument must be: ``kind`` makes the value of it, or raises.

    Then bounds, ``choices`` and ``fits`` must hold. ``wanted`` says it in words where ``kind`` is
    none of Python's types.
    """

    kind: Callable[[Any], Any]
    _: dataclasses.KW_ONLY
    wanted: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None  # as low, itself excluded
    below: float | None = None
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # that stand for themselves, whatever else it must be
    fits: Callable[[Any], Any] = lambda value: True
    optional: bool = False  # None stays None

    def parse(self, name: str, value: Any) -> Any:
        """The value, from a string or from Python, checked.

        Raises:
          OptionError: a wrong type, or a value out of range.
        """
        if value is None and self.optional:
            return None
        if isinstance(value, str) and value in self.words:
            return value
        try:
            parsed = self._converted(value)
            if not self.fits(parsed):
                raise ValueError
        except (ValueError, TypeError, KeyError, OverflowError):
            wanted = self.wanted or _WANTED.get(self.kind, "another value")
            wanted = " or ".join((wanted, *self.words))
            raise OptionError(f"{name}={shown(value)}: expected {wanted}") from None
        for bound, sign, holds in (
            (self.low, "≥", lambda x, y: x >= y),
            (self.above, ">", lambda x, y: x > y),
            (self.high, "≤", lambda x, y: x <= y),
            (self.below, "<", lambda x, y: x < y),
        ):
            if bound is not None and not holds(parsed, bound):
                raise OptionError(f"{name}={shown(value)}: expected a number {sign} {bound}")
        if self.choices and parsed not in self.choices:
            choices = ", ".join(self.choices)
            raise OptionError(f"{name}={shown(value)}: expected one of {choices}")
        return parsed

    def _converted(self, value: Any) -> Any:
        if self.kind is bool:
            return _TRUTH[value.lower() if isinstance(value, str) else value]
        if self.kind in (int, float):
            no_number = isinstance(value, (bool, np.bool_, bytes))
            if no_number or getattr(value, "ndim", 0):
                raise TypeError
        if self.kind is int and not isinstance(value, str) and value != int(value):
            raise ValueError
        return self.kind(value)


def shown(value: Any) -> str:
    """A value in a message: one line, arrays and models by their types."""
    plain = (str, numbers.Number, type(None))
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    if not isinstance(value, plain):
        flat = isinstance(value, (list, tuple)) and all(isinstance(x, plain) for x in value)
        return reprlib.repr(value) if flat else type(value).__name__
    line = " ".join(str(value).split())
    return line if len(line) <= SHOWN else line[:SHOWN] + "…"


def validate_arguments(**arguments: ArgSpec) -> Callable[[Function], Function]:
    """Decorator: checks these arguments of a function whenever they are given."""

    def decorate(function):
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args, **named):
            bound = signature.bind(*args, **named)
            for name, spec in arguments.items():
                if name in bound.arguments:
                    bound.arguments[name] = spec.parse(name, bound.arguments[name])
            return function(*bound.args, **bound.kwargs)

        return call

    return decorate


def validate_fields(part: Any, **fields: ArgSpec) -> None:
    """Checks fields of a frozen dataclass in its ``__post_init__``."""
    for name, spec in fields.items():
        object.__setattr__(part, name, spec.parse(name, getattr(part, name)))


def an(*kinds: type) -> Callable[[Any], Any]:
    """The kind of objects of these types."""

    def take(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise TypeError
        return value

    return take


def or_name(spec: ArgSpec) -> ArgSpec:
    """The same, or a name that stands for it."""

    def take(value: Any) -> Any:
        return value if isinstance(value, str) else spec.kind(value)

    return dataclasses.replace(spec, kind=take, wanted=f"a name, or {spec.wanted}")


def offering(*names: str) -> Callable[[Any], Any]:
    """The kind of objects, not classes, that have these attributes."""

    def take(value: Any) -> Any:
        if isinstance(value, type) or not all(hasattr(value, name) for name in names):
            raise TypeError
        return value

    return take


def texts(value: Any) -> tuple[str, ...]:
    """One text, or several."""
    several = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) for text in several):
        raise TypeError
    return several


def whole_numbers(value: Any) -> np.ndarray:
    """A sequence of whole numbers as an array ``[n]``, of any integer dtype."""
    if isinstance(value, (str, bytes, Mapping, Set)):
        raise TypeError
    array = np.asarray(value if hasattr(value, "__array__") else list(value))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError
    return array


def listed(value: Any) -> list[Any]:
    """Prompts in a list: a text is one, and so are numbers; an array ``[n, m]`` is n of them."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, (bytes, Mapping, Set)):
        raise TypeError
    several = list(value)
    numbers_alone = all(
        isinstance(x, numbers.Number) or (getattr(x, "ndim", 1) == 0 and not isinstance(x, str))
        for x in several
    )
    return [several] if several and numbers_alone else several


def branching(value: Any) -> tuple[int, ...]:
    """Children per level, from ``"4,2,2"`` or a sequence of numbers."""
    counts = value.split(",") if isinstance(value, str) else value
    return tuple(COUNT.parse("branching", count) for count in counts)


def costs(value: Any) -> tuple[float, ...]:
    """Numbers, from ``"1,1.6,2"`` or a sequence of them."""
    return tuple(map(float, value.split(",") if isinstance(value, str) else value))


COUNT = ArgSpec(int, low=1)
FLAG = ArgSpec(bool)
BRANCHING = ArgSpec(
    branching,
    fits=lambda counts: 0 < sum(itertools.accumulate(counts, operator.mul)) <= MOST_NODES,
    wanted=f"children per level, each at least 1, {MOST_NODES} nodes in all, such as 4,2,2",
)
TEXTS = ArgSpec(texts, wanted="a text, or several")
DRAFTER = ArgSpec(
    offering("propose", "sampling"), wanted="a specjax.Drafter, as specjax.draft.Chain()"
)
TARGET_DIST = ArgSpec(offering("log_p", "settings"), wanted="a specjax.TargetDist")
RULE = ArgSpec(
    offering("verify", "accepts"), wanted="a rule, which specjax.rule makes of a function"
)
METHOD = ArgSpec(
    offering("init", "step"), wanted="a name of specjax.methods(), or a specjax.Method"
)
