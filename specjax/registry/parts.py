"""What one part of a method is: how it is made, which options it has and what it needs.

The tables of parts are in :mod:`drafters`, :mod:`targets`, :mod:`rules` and :mod:`searches` of
this package. This file knows none of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specjax._util.arguments import as_costs
from specjax._util.checks import format_value
from specjax._util.errors import OptionError
from specjax.core.protocols import Rule
from specjax.lm import LM
from specjax.registry.options import Option, suggestion
from specjax.rewards import Fold

# Kinds of draft models: a language model, or a draft head on the target's hidden states (EAGLE-3).
MODEL = "model"
HEAD = "head"
MODEL_OR_HEAD = (MODEL, HEAD)


class Context(NamedTuple):
    """What a method is built for.

    ``greedy`` says whether the rows are decoded greedily. Defaults may depend on it; the method
    is exact either way. ``reward`` is for reward-guided methods. It is None without a reward, and
    if the reward needs text.
    """

    target: LM
    draft: LM | None
    greedy: bool = True
    reward: Fold | None = None
    # What verifies the drafts. It is set before the drafter is made, because a drafter may choose a
    # form of draft that the rule accepts.
    rule: Rule | None = None


@dataclasses.dataclass(frozen=True)
class PartSpec:
    """One entry of a table of parts.

    ``make`` is called with the static options by name. If ``needs_context``, it gets the
    :class:`Context` as its first argument. ``draft_kinds`` are the kinds of draft models that the
    part can run.
    """

    make: Callable[..., Any]
    summary: str
    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    needs_draft: bool = False
    needs_reward: bool = False
    needs_tuned: bool = False  # a target with adaptive tokens, tuned by SDSAT
    needs_context: bool = False
    draft_kinds: tuple[str, ...] = (MODEL,)

    def build(self, context: Context, values: Mapping[str, Any]) -> Any:
        """The part, made of its static options; ``values`` may hold options of other parts."""
        static = {name: values[name] for name, option in self.options.items() if _is_static(option)}
        if self.needs_context:
            return self.make(context, **static)
        return self.make(**static)


def _is_static(option: Option) -> bool:
    """Whether the part is made of it.

    Numbers go into the loop as arrays instead, and a preset only fills in other options.
    """
    return option.kind not in (float, as_costs) and not option.presets


def lookup(kind: str, table: Mapping[str, Any], name: str) -> Any:
    """The entry of a table with that name.

    Raises:
      OptionError: there is none; the message suggests the nearest name.
    """
    if not isinstance(name, str) or name not in table:
        text = format_value(name)
        raise OptionError(f"unknown {kind} {text!r}" + suggestion(text, table))
    return table[name]
