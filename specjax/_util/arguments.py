"""Checks of arguments: decorators that apply them, and what several functions accept.

A wrong argument is refused in one line that names it, before anything compiles. See
:class:`specjax._util.checks.Check`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import numbers
import operator
from collections.abc import Callable, Mapping, Set
from typing import Any, TypeVar, cast

import numpy as np

from specjax._util.checks import Check

Function = TypeVar("Function", bound=Callable[..., Any])

MAX_NODES = 4096  # of a tree: its mask has the square of them, which memory must hold


def validate_arguments(**checks: Check) -> Callable[[Function], Function]:
    """Decorator: checks and converts these arguments of a function if they are given.

    Defaults are not checked. The decorated function raises OptionError for a wrong argument.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            bound = signature.bind(*args, **named)
            for name, check in checks.items():
                if name in bound.arguments:
                    bound.arguments[name] = check.parse(name, bound.arguments[name])
            return function(*bound.args, **bound.kwargs)

        return cast(Function, call)

    return decorate


def validate_fields(instance: Any, **checks: Check) -> None:
    """Checks and converts fields of a frozen dataclass, in its ``__post_init__``."""
    for name, check in checks.items():
        value = check.parse(name, getattr(instance, name))
        object.__setattr__(instance, name, value)


def instance_of(*types: type) -> Callable[[Any], Any]:
    """A ``Check.kind`` that accepts instances of these types, unchanged."""

    def kind(value: Any) -> Any:
        if not isinstance(value, types):
            raise TypeError
        return value

    return kind


def has_attributes(*names: str) -> Callable[[Any], Any]:
    """A ``Check.kind`` that accepts objects with these attributes, but no classes."""

    def kind(value: Any) -> Any:
        if isinstance(value, type) or not all(hasattr(value, name) for name in names):
            raise TypeError
        return value

    return kind


def allow_name(check: Check) -> Check:
    """The same check, which accepts a text as well: the name of such a value."""

    def kind(value: Any) -> Any:
        return value if isinstance(value, str) else check.kind(value)

    return dataclasses.replace(check, kind=kind, expected=f"a name, or {check.expected}")


def as_texts(value: Any) -> tuple[str, ...]:
    """One text, or several, as a tuple.

    Raises:
      TypeError: one of them is no text.
    """
    if isinstance(value, str):
        return (value,)
    texts = tuple(value)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError
    return texts


def as_integer_array(value: Any) -> np.ndarray:
    """A sequence of whole numbers as an array ``[n]``, of any integer dtype.

    Raises:
      TypeError: it is no flat sequence of whole numbers.
    """
    if isinstance(value, (str, bytes, Mapping, Set)):
        raise TypeError
    array = np.asarray(value if hasattr(value, "__array__") else list(value))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError
    return array


def as_prompt_list(value: Any) -> list[Any]:
    """Prompts as a list.

    A text is one prompt, and so is a sequence of token ids. An array ``[n, m]`` is n of them.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, (bytes, Mapping, Set)):
        raise TypeError
    items = list(value)
    if items and all(map(_is_number, items)):
        return [items]
    return items


def _is_number(value: Any) -> bool:
    """Whether it is a number of Python, or an array of no axis."""
    is_scalar_array = getattr(value, "ndim", 1) == 0 and not isinstance(value, str)
    return isinstance(value, numbers.Number) or is_scalar_array


def as_branching(value: Any) -> tuple[int, ...]:
    """Children of a node, level by level, from ``"4,2,2"`` or a sequence of numbers."""
    counts = value.split(",") if isinstance(value, str) else value
    return tuple(COUNT.parse("branching", count) for count in counts)


def as_costs(value: Any) -> tuple[float, ...]:
    """Numbers, from ``"1,1.6,2"`` or a sequence of them."""
    items = value.split(",") if isinstance(value, str) else value
    return tuple(map(float, items))


def _count_nodes(branching: tuple[int, ...]) -> int:
    """Nodes of the tree below its root."""
    nodes_per_level = itertools.accumulate(branching, operator.mul)
    return sum(nodes_per_level)


COUNT = Check(int, low=1)
FLAG = Check(bool)
BRANCHING = Check(
    as_branching,
    fits=lambda branching: 0 < _count_nodes(branching) <= MAX_NODES,
    expected=f"children per level, each at least 1, {MAX_NODES} nodes in all, such as 4,2,2",
)
TEXTS = Check(as_texts, expected="a text, or several")
DRAFTER = Check(
    has_attributes("propose", "sampling"), expected="a specjax.Drafter, as specjax.draft.Chain()"
)
TARGET_DIST = Check(has_attributes("log_p", "settings"), expected="a specjax.TargetDist")
RULE = Check(
    has_attributes("verify", "accepts"), expected="a rule, which specjax.rule makes of a function"
)
METHOD = Check(
    has_attributes("init", "step"), expected="a name of specjax.methods(), or a specjax.Method"
)
