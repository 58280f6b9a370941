"""A method before it is built: its parts by name, its options and their defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from specjax._util.errors import OptionError, PairError
from specjax.core.protocols import Drafter, Method, Rule, TargetDist
from specjax.core.round import DraftVerify
from specjax.draft.auto_length import COSTS, LENGTHS, TREES, AutoLengthChain, AutoLengthTree
from specjax.models.families.head_config import HeadConfig
from specjax.registry.drafters import DRAFTERS, TwoPasses
from specjax.registry.options import AUTO, MEASURED, REQUIRED, Option, suggestion
from specjax.registry.parts import HEAD, MODEL, MODEL_OR_HEAD, Context, PartSpec, lookup
from specjax.registry.rules import RULES
from specjax.registry.searches import SEARCHES
from specjax.registry.targets import TARGET_DISTS
from specjax.search import TwoStep
from specjax.target import Contrastive

# Drafters whose head can be the amateur of contrastive decoding: it scores only chains.
AMATEUR_HEADS = ("chain", "head")
DRAFT_WORDS = {MODEL: "a draft model", HEAD: "a head"}

# Options that the decode loop reads as float32 arrays, by name.
Settings = dict[str, float | tuple[float, ...]]


class _AutoLength(NamedTuple):
    """What an option's value ``auto`` means: a method that chooses the draft of each round."""

    option: str
    largest: Any  # the drafter is made with this value of the option; it bounds every draft
    method: type[DraftVerify]


_AUTO_LENGTHS = (
    _AutoLength("gamma", max(LENGTHS), AutoLengthChain),
    _AutoLength("branching", TREES[-1], AutoLengthTree),
)


@dataclasses.dataclass(frozen=True)
class MethodSpec:
    """A method: its parts, the option defaults that differ from theirs, and its paper.

    It is a drafter, a rule and a target distribution, each by name or as an object, or it is one
    entry of ``SEARCHES``.
    """

    name: str
    summary: str
    paper: str
    drafter: str | Drafter = ""
    rule: str | Rule = ""
    target_dist: str | TargetDist = "warped"
    search: str = ""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def parts(self) -> tuple[PartSpec, ...]:
        """The search alone, or the drafter, the target distribution and the rule."""
        if self.search:
            return (SEARCHES[self.search],)
        return (
            part_of("drafter", DRAFTERS, self.drafter),
            part_of("target distribution", TARGET_DISTS, self.target_dist),
            part_of("rule", RULES, self.rule),
        )

    @property
    def lossless(self) -> bool:
        """Whether the output has exactly the target distribution.

        That is up to the rule. A search never has it: it chooses its output.
        """
        if self.search:
            return False
        _, _, rule = self.parts
        return rule.make().lossless

    @property
    def options(self) -> dict[str, Option]:
        """Every option of the method's parts, with the method's own defaults."""
        options: dict[str, Option] = {}
        for part in self.parts:
            options |= part.options
        for name, default in self.defaults.items():
            if name in options:
                options[name] = dataclasses.replace(options[name], default=default)
        return options

    @property
    def needs_draft(self) -> bool:
        return any(part.needs_draft for part in self.parts)

    @property
    def needs_reward(self) -> bool:
        return any(part.needs_reward for part in self.parts)

    @property
    def needs(self) -> str:
        """What the method needs beside a target, in words: "nothing", or "a draft model"."""
        drafting = [part for part in self.parts if part.needs_draft]
        wanted = []
        if any(part.needs_tuned for part in self.parts):
            wanted.append("a target tuned with SDSAT")
        if drafting:
            # Every part runs the same draft model, so all of them must be able to.
            kinds = [k for k in MODEL_OR_HEAD if all(k in part.draft_kinds for part in drafting)]
            if self.target_dist == "contrastive" and self.drafter not in AMATEUR_HEADS:
                kinds = [MODEL]
            wanted.append(" or ".join(DRAFT_WORDS[kind] for kind in kinds))
        if self.needs_reward:
            wanted.append("a reward")
        return " and ".join(wanted) or "nothing"

    def resolve(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The value of every option: the one given, else a preset's, else the default.

        A preset's value is ignored if the method does not have that option.

        Raises:
          OptionError: an unknown name, or a bad value.
        """
        known = self.options
        for name in options:
            if name not in known:
                raise OptionError(
                    f"unknown option {name!r} of method {self.name}" + suggestion(name, known)
                )

        values: dict[str, Any] = {}
        for name, option in known.items():
            if option.presets:
                choice = option.parse(name, options.get(name, option.default))
                values |= option.presets.get(choice, {})
        values |= options

        return {
            name: option.parse(name, values.get(name, option.default))
            for name, option in known.items()
        }

    def build(self, context: Context, options: Mapping[str, Any]) -> tuple[Method, Settings]:
        """The method, and the settings that go into its loop as arrays.

        Raises:
          PairError: the draft model is missing or of the wrong kind, or the parts do not fit.
          OptionError: as :meth:`resolve`, or a count of tokens is above the vocabulary's.
        """
        values = self.resolve(options)
        self._check_draft_model(context)

        auto_length = _find_auto_length(values)
        settings = _array_settings(values, auto_length)
        if auto_length:
            # The drafter is made for the largest draft; the method shortens it round by round.
            values[auto_length.option] = auto_length.largest
        self._check_vocabulary(context, values)

        if self.search:
            (search,) = self.parts
            return search.build(context, values), settings
        method_type = auto_length.method if auto_length else DraftVerify
        return self._build_draft_verify(method_type, context, values), settings

    def _build_draft_verify(
        self, method_type: type[DraftVerify], context: Context, values: Mapping[str, Any]
    ) -> Method:
        """The method of a drafter, a target distribution and a rule."""
        drafter_part, target_part, rule_part = self.parts
        rule = rule_part.build(context, values)
        # The rule comes first: a drafter may choose a form of draft that the rule accepts.
        context = context._replace(rule=rule)
        drafter = drafter_part.build(context, values)
        target = target_part.build(context, values)

        # The amateur is the draft model of contrastive decoding. In a method of two passes the
        # target drafts for itself, so no draft can carry the amateur's logits.
        if isinstance(drafter, TwoPasses):
            return TwoStep(drafter.probe, drafter.verify, target.standalone(), rule)

        # The amateur's logits come with the draft if the drafter has them at every node. Otherwise
        # the amateur runs by itself over the draft.
        if target.needs_draft_logits:
            drafter_with_logits = drafter.with_logits()
            if drafter_with_logits:
                return method_type(drafter_with_logits, target, rule)
            target = target.standalone()
        runs_draft_model = target.needs_draft and not target.needs_draft_logits
        if runs_draft_model and context.draft is not None and context.draft.is_head:
            raise PairError(
                f"draft {context.draft.source} is a head, which scores only the chain that it "
                f"drafts: drafter {drafter.name} with rule {rule.name} needs a model as amateur"
            )
        return method_type(drafter, target, rule)

    def _check_draft_model(self, context: Context) -> None:
        """Checks that there is a draft model if one is needed, and that the parts can run it.

        Raises:
          PairError: it is missing, or a head where a model is needed, or the reverse.
        """
        draft = context.draft
        if draft is None:
            if self.needs_draft:
                raise PairError(f"method {self.name} needs a draft model: give --draft (or draft=)")
            return
        kind = HEAD if draft.is_head else MODEL
        for part in self.parts:
            if not part.needs_draft or kind in part.draft_kinds:
                continue
            if kind == HEAD:
                raise PairError(
                    f"method {self.name} runs a whole draft model, and {draft.source} is a head on "
                    "hidden states: take a method of chains or trees, or --drafter head"
                )
            raise PairError(
                f"drafter head reads the target's hidden states, and draft {draft.source} is a "
                "whole model: give --draft the directory of a head, or take another --drafter"
            )

    def _check_vocabulary(self, context: Context, values: Mapping[str, Any]) -> None:
        """Checks the options that count different tokens.

        Raises:
          OptionError: one is larger than the vocabulary.
        """
        vocab_size = context.target.config.vocab_size
        # A head may draft from only a part of the vocabulary.
        if self.needs_draft and context.draft is not None:
            draft_config = context.draft.config
            if isinstance(draft_config, HeadConfig):
                vocab_size = draft_config.draft_size
        for name, option in self.options.items():
            option.check_vocabulary(name, values[name], vocab_size)


def _find_auto_length(values: Mapping[str, Any]) -> _AutoLength | None:
    """What chooses the drafts, if an option has the value ``auto``."""
    for auto_length in _AUTO_LENGTHS:
        if values.get(auto_length.option) == AUTO:
            return auto_length
    return None


def _array_settings(values: Mapping[str, Any], auto_length: _AutoLength | None) -> Settings:
    """The floats among the values; with an automatic length, the costs too where they are given."""
    settings: Settings = {name: value for name, value in values.items() if isinstance(value, float)}
    if auto_length and values[COSTS] != MEASURED:
        settings[COSTS] = values[COSTS]
    return settings


# Every setting that a part of the tables reads. A part that is given as an object has these
# defaults and bounds, too.
_KNOWN_SETTINGS = {
    name: option
    for table in (DRAFTERS, TARGET_DISTS, RULES)
    for part in table.values()
    for name, option in part.options.items()
    if option.kind is float
}


def part_of(
    kind: str, table: Mapping[str, PartSpec], part: str | Drafter | TargetDist | Rule
) -> PartSpec:
    """The entry of a table with a name, or an entry made of an object.

    The options of an object are its settings. One that no part of the tables reads has no default.

    Raises:
      OptionError: no part has that name.
    """
    if isinstance(part, str):
        return lookup(kind, table, part)
    options = {
        name: _KNOWN_SETTINGS.get(name, Option(float, REQUIRED, "")) for name in part.settings
    }
    if isinstance(part, Rule):
        return PartSpec(lambda: part, "", options)
    draft_kinds = (MODEL,)
    if isinstance(part, Contrastive):
        draft_kinds = MODEL_OR_HEAD
    elif getattr(part, "needs_head", False):
        draft_kinds = (HEAD,)
    return PartSpec(
        lambda: part, "", options, needs_draft=part.needs_draft, draft_kinds=draft_kinds
    )
