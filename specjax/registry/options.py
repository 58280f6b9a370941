"""Options of a method's parts: their types, defaults and ranges."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from specjax._util.arguments import ArgSpec
from specjax._util.errors import OptionError

REQUIRED = object()  # in place of a default
AUTO, MEASURED = "auto", "measured"  # a draft length by costs, and where these come from


@dataclasses.dataclass(frozen=True)
class Option(ArgSpec):
    """One setting of a part. Floats are arrays in the loop (changing one never recompiles);
    everything else is static."""

    default: Any
    help: str
    _: dataclasses.KW_ONLY
    within_vocabulary: bool = False  # so many different tokens: no more than there are
    # A choice may stand for values of other options of the method: those that are not given.
    presets: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @classmethod
    def preset(cls, help: str, presets: Mapping[str, Mapping[str, Any]]) -> Option:
        """An option whose choices are presets, by name; by default none of them."""
        return cls(str, "none", help, choices=("none", *presets), presets=presets)

    def parse(self, name: str, value: Any) -> Any:
        """The value, checked as by :class:`specjax._util.arguments.ArgSpec`.

        Raises:
          OptionError: a wrong type, a value out of range, or none.
        """
        if value is REQUIRED:
            raise OptionError(f"option {name} has no default: give options={{{name!r}: …}}")
        return super().parse(name, value)

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
