"""The table: every method by name.

One entry here gives a method its command line, its documentation, its place in the benchmark
and its run through the shared tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specjax._util.arguments import DRAFTER, RULE, TARGET_DIST, allow_name, validate_arguments
from specjax.core.protocols import Drafter, Rule, TargetDist
from specjax.registry.drafters import DRAFTERS
from specjax.registry.method_spec import MethodSpec
from specjax.registry.options import AUTO
from specjax.registry.parts import lookup
from specjax.registry.rules import RULES
from specjax.registry.searches import SEARCHES
from specjax.registry.targets import TARGET_DISTS

METHODS: dict[str, MethodSpec] = {
    spec.name: spec
    for spec in (
        MethodSpec(
            "autoregressive",
            "plain decoding: one token per target pass, greedy or sampled",
            "the baseline",
            drafter="none",
            rule="match",
        ),
        MethodSpec(
            "beam",
            "beam search, or beam sampling at a temperature above 0",
            "Hugging Face num_beams",
            search="beam",
        ),
        MethodSpec(
            "speculative",
            "a draft model proposes γ tokens, and the target verifies them in one pass",
            "Leviathan et al. 2023; Chen et al. 2023",
            drafter="chain",
            rule="speculative",
        ),
        MethodSpec(
            "block",
            "speculative, but judged as a block: in expectation it accepts at least as many tokens",
            "Sun et al. 2024 (block verification)",
            drafter="chain",
            rule="block",
        ),
        MethodSpec(
            "spectr",
            "k independent chains, verified together by optimal transport (k-SEQ)",
            "Sun et al. 2023 (SpecTr)",
            drafter="iid",
            rule="spectr",
        ),
        MethodSpec(
            "specinfer",
            "a token tree: the children of a node are tried in turn",
            "Miao et al. 2024 (SpecInfer)",
            drafter="tree",
            rule="specinfer",
        ),
        MethodSpec(
            "tree-match",
            "a token tree: tokens sampled from the target are followed while the tree has them",
            "Miao et al. 2024 (SpecInfer), naive sampling",
            drafter="tree",
            rule="match",
        ),
        MethodSpec(
            "bild",
            "the draft model writes while it is sure, the target cuts unlikely tokens",
            "Kim et al. 2023 (BiLD)",
            drafter="chain",
            rule="bild",
            defaults={"gamma": 10, "stop": "before"},
        ),
        MethodSpec(
            "contrastive",
            "each token from the target's logits against those of the draft model (the amateur)",
            "Li et al. 2023; O'Brien and Lewis 2023",
            drafter="none",
            rule="match",
            target_dist="contrastive",
        ),
        MethodSpec(
            "scd",
            "contrastive decoding with speculative drafts of the amateur",
            "Yuan et al. 2024 (SCD)",
            drafter="chain",
            rule="speculative",
            target_dist="contrastive",
        ),
        MethodSpec(
            "block-scd",
            "contrastive decoding with speculative drafts and block verification",
            "a combination of ours",
            drafter="chain",
            rule="block",
            target_dist="contrastive",
        ),
        MethodSpec(
            "tree-scd",
            "contrastive decoding with token trees of the amateur",
            "a combination of ours",
            drafter="tree",
            rule="specinfer",
            target_dist="contrastive",
        ),
        MethodSpec(
            "lookup-mentored",
            "drafts copied from earlier text, accepted as often as a KL bound allows",
            "a combination of ours",
            drafter="lookup",
            rule="mentored",
        ),
        MethodSpec(
            "mentored",
            "speculative, but more is accepted, at a bounded KL divergence from p",
            "Tran-Thien 2023 (mentored decoding)",
            drafter="chain",
            rule="mentored",
        ),
        MethodSpec(
            "mtjd",
            "blocks of several tokens from the target's joint distribution",
            "Qin et al. 2024 (MTJD)",
            search="mtjd",
        ),
        MethodSpec(
            "mtad",
            "the draft model's best beam, accepted by its joint probability under the target",
            "Qin et al. 2024 (MTAD)",
            drafter="beam",
            rule="joint",
        ),
        MethodSpec(
            "cdlh",
            "greedy: the candidate token whose lookahead by the target has the best reward",
            "Lu et al. 2022; Nakshatri et al. 2025, §2.1",
            search="lookahead",
        ),
        MethodSpec(
            "cdlh-appx",
            "cdlh with lookaheads of the draft model, which are cheaper",
            "Nakshatri et al. 2025, §3.1",
            search="draft-lookahead",
        ),
        MethodSpec(
            "cdsl",
            "verified drafts while their reward is good, lookaheads where it is not",
            "Nakshatri et al. 2025 (CDSL)",
            search="cdsl",
        ),
        MethodSpec(
            "sdsat",
            "a target tuned to draft for itself: one pass to draft, one to verify",
            "Liu et al. 2024 (SDSAT)",
            drafter="adaptive",
            rule="match",
        ),
        MethodSpec(
            "sdsat-single",
            "a target tuned to draft for itself, in the same pass that verifies",
            "after Liu et al. 2024 (SDSAT)",
            drafter="adaptive",
            rule="speculative",
            defaults={"single": True},
        ),
        MethodSpec(
            "lookup",
            "no draft model: what followed the same n-gram earlier in the row",
            "prompt lookup decoding (n-gram drafts)",
            drafter="lookup",
            rule="match",
            defaults={"gamma": AUTO},
        ),
        MethodSpec(
            "suffix",
            "no draft model: what followed the same n-gram in any row or earlier request",
            "after Oliaro et al. 2024 (SuffixDecoding)",
            drafter="suffix",
            rule="match",
            defaults={"gamma": AUTO},
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


def presets() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Every preset: the name of its part, ``option=name``, and the values that it fills in."""
    for table in (DRAFTERS, TARGET_DISTS, RULES, SEARCHES):
        for part_name, part in table.items():
            for option_name, option in part.options.items():
                for preset_name, values in option.presets.items():
                    yield part_name, f"{option_name}={preset_name}", values


def usual_rule(drafter: str | Drafter) -> str:
    """The name of the rule that verifies a drafter's drafts where none is given.

    Raises:
      OptionError: no drafter has that name.
    """
    if isinstance(drafter, str):
        make_drafter = lookup("drafter", DRAFTERS, drafter).make
        # The table holds classes, which have a usual rule, and functions, which have none and get
        # the default.
        return getattr(make_drafter, "usual_rule", Drafter.usual_rule)
    return getattr(drafter, "usual_rule", Drafter.usual_rule)


@validate_arguments(
    drafter=allow_name(DRAFTER), rule=allow_name(RULE), target_dist=allow_name(TARGET_DIST)
)
def compose(
    drafter: str | Drafter, rule: str | Rule, target_dist: str | TargetDist = "warped"
) -> MethodSpec:
    """A method of any drafter, rule and target distribution, each by name or as an object.

    Its name is theirs, such as ``chain+match``; the warped target distribution is left out.

    Raises:
      OptionError: a part is neither a name nor such an object.
    """
    names = [
        drafter if isinstance(drafter, str) else drafter.name,
        rule if isinstance(rule, str) else rule.name,
    ]
    if isinstance(target_dist, str):
        names += [target_dist] if target_dist != "warped" else []
    else:
        names.append(type(target_dist).__name__)
    return MethodSpec("+".join(names), "composed", "", drafter, rule, target_dist)
