"""Options of a method's parts: their types, defaults and ranges."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from specjax._util.checks import Check
from specjax._util.errors import OptionError

REQUIRED = object()  # the default of an option that has none
AUTO = "auto"  # a value of gamma or branching: the length is chosen by measured costs
MEASURED = "measured"  # the value of costs that are measured before the run


@dataclasses.dataclass(frozen=True)
class Option(Check):
    """One setting of a part.

    Floats are arrays in the decode loop, so that another value does not recompile it. Everything
    else is static.
    """

    default: Any
    help: str
    _: dataclasses.KW_ONLY
    # The option counts different tokens: it cannot be larger than the vocabulary.
    within_vocabulary: bool = False
    # Each choice fills in values of other options of the method, where those are not given.
    presets: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @classmethod
    def preset(cls, help: str, presets: Mapping[str, Mapping[str, Any]]) -> Option:
        """An option whose choices are presets, by name. The default is ``none`` of them."""
        return cls(str, "none", help, choices=("none", *presets), presets=presets)

    def parse(self, name: str, value: Any) -> Any:
        """The checked value, as :meth:`Check.parse` gives it.

        Raises:
          OptionError: a wrong type, a value out of range, or no value.
        """
        if value is REQUIRED:
            raise OptionError(f"option {name} has no default: give options={{{name!r}: …}}")
        return super().parse(name, value)

    def check_vocabulary(self, name: str, value: Any, vocab_size: int) -> None:
        """Checks that the option asks for no more different tokens than there are.

        Raises:
          OptionError: it asks for more.
        """
        if not self.within_vocabulary:
            return
        count = max(value) if isinstance(value, tuple) else value
        if count > vocab_size:
            raise OptionError(f"{name}={count} is more than the vocabulary's {vocab_size} tokens")


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: what could have been meant."""
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"; did you mean {near[0]!r}?"
    if known:
        return f"; known: {', '.join(known)}"
    return "; it has none"
