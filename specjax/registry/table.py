"""The table: every method by name.

One entry here gives a method its command line, its documentation, its place in the benchmark
and its run through the shared tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax._util.arguments import DRAFTER, RULE, TARGET_DIST, or_name, validate_arguments
from specjax._util.errors import OptionError, PairError
from specjax.core.protocols import Drafter, Method, Rule, TargetDist
from specjax.core.round import DraftVerify
from specjax.draft.auto_length import COSTS, LENGTHS, TREES, AutoLengthChain, AutoLengthTree
from specjax.registry.options import AUTO, MEASURED, Option, hint
from specjax.registry.parts import (
    DRAFTERS,
    HEAD,
    RULES,
    SEARCHES,
    TARGET_DISTS,
    WHOLE,
    Context,
    PartSpec,
    TwoPasses,
    lookup,
    part_of,
)
from specjax.search import TwoStep


@dataclasses.dataclass(frozen=True)
class MethodSpec:
    """A method: its parts, option defaults that differ, and where it is from.

    A method is a drafter, a rule and a target distribution, each by name or as an object, or one
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
        if self.search:
            return (SEARCHES[self.search],)
        return (
            part_of("drafter", DRAFTERS, self.drafter),
            part_of("target distribution", TARGET_DISTS, self.target_dist),
            part_of("rule", RULES, self.rule),
        )

    @property
    def lossless(self) -> bool:
        """Whether the output has exactly the law of the target distribution: as the rule has it.

        Searches choose what they write.
        """
        return not self.search and self.parts[2].make().lossless

    @property
    def options(self) -> dict[str, Option]:
        """Every option of the method's parts, with the method's own defaults."""
        merged = {name: option for part in self.parts for name, option in part.options.items()}
        return {
            name: dataclasses.replace(option, default=self.defaults.get(name, option.default))
            for name, option in merged.items()
        }

    @property
    def needs_draft(self) -> bool:
        return any(part.needs_draft for part in self.parts)

    @property
    def needs_reward(self) -> bool:
        return any(part.needs_reward for part in self.parts)

    def resolve(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """All options with their values: given, else of a preset, else the defaults.

        What the method has no option for, a preset does not fill in.

        Raises:
          OptionError: an unknown name, or a bad value.
        """
        known = self.options
        for name in options:
            if name not in known:
                raise OptionError(
                    f"unknown option {name!r} of method {self.name}" + hint(name, known)
                )
        values: dict[str, Any] = {}
        for name, option in known.items():
            if option.presets:
                chosen = option.parse(name, options.get(name, option.default))
                values |= option.presets.get(chosen, {})
        values |= options
        return {n: o.parse(n, values.get(n, o.default)) for n, o in known.items()}

    def build(
        self, context: Context, options: Mapping[str, Any]
    ) -> tuple[Method, dict[str, float | tuple[float, ...]]]:
        """The method, and the settings that go into the loop as arrays.

        Raises:
          PairError: a draft model is missing, or the parts do not fit together.
          OptionError: as :meth:`resolve`.
        """
        values = self.resolve(options)
        if self.needs_draft and context.draft is None:
            raise PairError(f"method {self.name} needs a draft model: give --draft (or draft=)")
        vocab = context.target.config.vocab_size
        if self.needs_draft and context.draft.is_head:
            vocab = context.draft.config.draft_size
        self._check_draft(context)
        settings = {name: value for name, value in values.items() if isinstance(value, float)}
        make, largest = DraftVerify, {}
        if values.get("gamma") == AUTO:
            make, largest = AutoLengthChain, {"gamma": max(LENGTHS)}
        elif values.get("branching") == AUTO:
            make, largest = AutoLengthTree, {"branching": TREES[-1]}
        if largest and values[COSTS] != MEASURED:
            settings |= {COSTS: values[COSTS]}
        values |= largest
        for name, option in self.options.items():
            option.check_vocabulary(name, values[name], vocab)
        if self.search:
            return self.parts[0].build(context, values), settings
        rule = self.parts[2].build(context, values)
        context = context._replace(rule=rule)
        drafter, target = (part.build(context, values) for part in self.parts[:2])
        if isinstance(drafter, TwoPasses):
            return TwoStep(*drafter, target.standalone(), rule), settings
        if target.needs_draft_logits:
            giving = drafter.with_logits()
            drafter, target = (giving, target) if giving else (drafter, target.standalone())
        if target.needs_draft and not target.needs_draft_logits and context.draft.is_head:
            raise PairError(
                f"{context.draft.source} is a head, which scores only what it drafts as a chain: "
                f"drafter {drafter.name} with rule {rule.name} needs a model as amateur"
            )
        return make(drafter, target, rule), settings

    def _check_draft(self, context: Context) -> None:
        """Refuses a draft of a kind that a part does not run.

        Raises:
          PairError: so.
        """
        for part in self.parts if context.draft else ():
            kind, source = HEAD if context.draft.is_head else WHOLE, context.draft.source
            if not part.needs_draft or kind in part.drafts:
                continue
            if kind == HEAD:
                raise PairError(
                    f"method {self.name} runs a whole draft model, and {source} is a head on "
                    "hidden states: take a method of chains or trees, or --drafter head"
                )
            raise PairError(
                f"drafter head reads the target's hidden states, and draft {source} is a whole "
                "model: give --draft the directory of a head, or take another --drafter"
            )


METHODS: dict[str, MethodSpec] = {
    spec.name: spec
    for spec in (
        MethodSpec(
            "autoregressive",
            "one token per target pass: greedy, or drawn under temperature, top-k and top-p",
            "the baseline",
            drafter="none",
            rule="match",
        ),
        MethodSpec(
            "beam",
            "beam search, or beam sampling at a temperature",
            "Hugging Face num_beams",
            search="beam",
        ),
        MethodSpec(
            "speculative",
            "a draft model proposes γ tokens, the target verifies them in one pass",
            "Leviathan et al. 2023; Chen et al. 2023",
            drafter="chain",
            rule="speculative",
        ),
        MethodSpec(
            "block",
            "speculative, but the draft is accepted or cut as a block",
            "Sun et al. 2024 (block verification)",
            drafter="chain",
            rule="block",
        ),
        MethodSpec(
            "spectr",
            "k independent chains, accepted by optimal transport (k-SEQ)",
            "Sun et al. 2023 (SpecTr)",
            drafter="iid",
            rule="spectr",
        ),
        MethodSpec(
            "specinfer",
            "a token tree, siblings tried in turn",
            "Miao et al. 2024 (SpecInfer)",
            drafter="tree",
            rule="specinfer",
        ),
        MethodSpec(
            "tree-match",
            "a token tree, followed as far as draws of the target agree",
            "Miao et al. 2024 (SpecInfer), naive sampling",
            drafter="tree",
            rule="match",
        ),
        MethodSpec(
            "bild",
            "the draft writes while it is sure, the target rolls back what it doubts",
            "Kim et al. 2023 (BiLD)",
            drafter="chain",
            rule="bild",
            defaults={"gamma": 10, "stop": "before"},
        ),
        MethodSpec(
            "contrastive",
            "each token from what the target says more than the draft model",
            "Li et al. 2023; O'Brien and Lewis 2023",
            drafter="none",
            rule="match",
            target_dist="contrastive",
        ),
        MethodSpec(
            "scd",
            "speculative contrastive decoding: the amateur is the draft",
            "Yuan et al. 2024 (SCD)",
            drafter="chain",
            rule="speculative",
            target_dist="contrastive",
        ),
        MethodSpec(
            "block-scd",
            "contrastive decoding with block verification",
            "a pair that no paper has",
            drafter="chain",
            rule="block",
            target_dist="contrastive",
        ),
        MethodSpec(
            "tree-scd",
            "contrastive decoding over a token tree",
            "a pair that no paper has",
            drafter="tree",
            rule="specinfer",
            target_dist="contrastive",
        ),
        MethodSpec(
            "lookup-mentored",
            "copied n-grams, accepted as often as a KL bound allows",
            "a pair that no paper has",
            drafter="lookup",
            rule="mentored",
        ),
        MethodSpec(
            "mentored",
            "speculative with a bounded deviation from p, for more acceptance",
            "Tran-Thien 2023 (mentored decoding)",
            drafter="chain",
            rule="mentored",
        ),
        MethodSpec(
            "mtjd",
            "several tokens at a time from the target's joint distribution",
            "Qin et al. 2024 (MTJD)",
            search="mtjd",
        ),
        MethodSpec(
            "mtad",
            "the best beam of the draft, accepted by its joint probability",
            "Qin et al. 2024 (MTAD)",
            drafter="beam",
            rule="joint",
        ),
        MethodSpec(
            "cdlh",
            "greedy, each token by the reward of what the target would say after it",
            "Lu et al. 2022; Nakshatri et al. 2025, §2.1",
            search="lookahead",
        ),
        MethodSpec(
            "cdlh-appx",
            "cdlh with the draft model's lookaheads",
            "Nakshatri et al. 2025, §3.1",
            search="draft-lookahead",
        ),
        MethodSpec(
            "cdsl",
            "verified drafts while the reward is content, lookaheads where it is not",
            "Nakshatri et al. 2025 (CDSL)",
            search="cdsl",
        ),
        MethodSpec(
            "sdsat",
            "the tuned target drafts for itself: one pass to draft, one to verify",
            "Liu et al. 2024 (SDSAT)",
            drafter="adaptive",
            rule="match",
        ),
        MethodSpec(
            "sdsat-single",
            "the tuned target verifies and drafts in the same pass",
            "after Liu et al. 2024 (SDSAT)",
            drafter="adaptive",
            rule="speculative",
            defaults={"single": True},
        ),
        MethodSpec(
            "lookup",
            "no draft model: the tokens that followed the same words earlier in the row",
            "prompt lookup decoding (n-gram drafts)",
            drafter="lookup",
            rule="speculative",
        ),
        MethodSpec(
            "suffix",
            "no draft model: what followed the same words in any row or earlier request",
            "after Oliaro et al. 2024 (SuffixDecoding)",
            drafter="suffix",
            rule="match",
        ),
    )
}


def methods() -> dict[str, MethodSpec]:
    """The table of methods by name."""
    return dict(METHODS)


def method(name: str) -> MethodSpec:
    """One entry of the table.

    Raises:
      OptionError: no method has that name.
    """
    return lookup("method", METHODS, name)


def usual_rule(drafter: str | Drafter) -> str:
    """The rule of a drafter where none is named.

    Raises:
      OptionError: no drafter has that name.
    """
    made = lookup("drafter", DRAFTERS, drafter).make if isinstance(drafter, str) else drafter
    return getattr(made, "usual_rule", Drafter.usual_rule)


@validate_arguments(drafter=or_name(DRAFTER), rule=or_name(RULE), target_dist=or_name(TARGET_DIST))
def compose(
    drafter: str | Drafter, rule: str | Rule, target_dist: str | TargetDist = "warped"
) -> MethodSpec:
    """An unnamed method of any drafter, rule and target distribution, by name or as objects.

    Raises:
      OptionError: a part is neither.
    """
    said = [part if isinstance(part, str) else part.name for part in (drafter, rule)]
    if target_dist != "warped":
        said.append(target_dist if isinstance(target_dist, str) else type(target_dist).__name__)
    return MethodSpec("+".join(said), "composed", "", drafter, rule, target_dist)
