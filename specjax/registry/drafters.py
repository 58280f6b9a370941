"""The drafters by name, and the functions that make them of their options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specjax import draft
from specjax._util.arguments import BRANCHING, MAX_NODES, as_branching, as_costs
from specjax._util.errors import OptionError, PairError
from specjax.core.protocols import Drafter
from specjax.core.types import DETERMINISTIC
from specjax.draft.adaptive import CHAIN, FORMS, MOST, TREE
from specjax.draft.auto_length import LENGTHS, TREES
from specjax.draft.beam import JOINTS, VERIFIED
from specjax.lm import LM
from specjax.registry.options import AUTO, MEASURED, Option
from specjax.registry.parts import HEAD, MODEL_OR_HEAD, Context, PartSpec


def _accepts_chosen_trees(context: Context) -> bool:
    """Whether the rule verifies trees of the most probable tokens, which are not sampled."""
    assert context.rule is not None, "MethodSpec.build makes the rule before the drafter"
    return DETERMINISTIC in context.rule.accepts and not context.rule.chain_only


class TwoPasses(NamedTuple):
    """The drafters of a method of two target passes a round, :class:`specjax.search.TwoStep`."""

    probe: draft.ProbePass
    verify: draft.VerifyPass


def _adaptive(
    context: Context, k: int, form: str, single: bool, groups: int
) -> draft.SinglePass | TwoPasses:
    """SDSAT's drafter of one pass (``single``), or the two of a probe and a verify pass.

    Raises:
      PairError: the target has no adaptive tokens, or a single pass is to draft a tree.
      OptionError: more adaptive tokens than the target was tuned with.
    """
    adaptive_ids = _adaptive_ids(context.target, k)
    if form == AUTO:
        sampled = not context.greedy
        form = TREE if sampled and not single and _accepts_chosen_trees(context) else CHAIN
    if single and form == TREE:
        raise PairError(
            "single=true drafts only a chain, because each node needs a group of probes: "
            "use form=chain, or single=false"
        )
    candidates = draft.Candidates(len(adaptive_ids), form)
    if single:
        nodes = len(adaptive_ids) + 1
        return draft.SinglePass(candidates, adaptive_ids, min(groups or nodes, nodes))
    return TwoPasses(draft.ProbePass(adaptive_ids), draft.VerifyPass(candidates))


def _adaptive_ids(target: LM, k: int) -> tuple[int, ...]:
    """The token ids of a₁ … a_k. With k = 0 they are as many as the model was tuned with.

    Raises:
      PairError: the target has no adaptive tokens.
      OptionError: more adaptive tokens than the target was tuned with.
    """
    trained = target.config.adaptive_ids
    if not trained:
        raise PairError(
            f"target {target.source} has no adaptive tokens: tune it with train.sdsat, name those "
            "it was tuned with in config.json's adaptive_ids, or take --target demo-sdsat"
        )
    k = k or len(trained)
    # A model that was tuned with one token, repeated, drafts any number of tokens.
    if len(set(trained)) == 1:
        return (trained[0],) * k
    if k > len(trained):
        raise OptionError(
            f"k={k}: target {target.source} was tuned with {len(trained)} distinct adaptive "
            f"tokens; give k={len(trained)} or less"
        )
    return trained[:k]


def _model_or_head(
    of_model: Callable[..., Drafter], of_head: Callable[..., Drafter]
) -> Callable[..., Drafter]:
    """The maker of a drafter that runs either kind of draft model."""

    def make(context: Context, **options: Any) -> Drafter:
        assert context.draft is not None, "MethodSpec.build refuses a missing draft model"
        make_drafter = of_head if context.draft.is_head else of_model
        return make_drafter(**options)

    return make


_HEAD_DRAFTERS = {"none": draft.HeadChain, "drawn": draft.HeadTree, "dynamic": draft.HeadBest}


def _head(context: Context, tree: str, **options: Any) -> Drafter:
    """The drafter of a draft head, made of those options that its form of draft has.

    ``options`` are those of every form: a chain has no ``budget``, a drawn tree no ``gamma``.
    """
    if tree == AUTO:
        tree = "dynamic" if _accepts_chosen_trees(context) else "none"
    make_drafter = _HEAD_DRAFTERS[tree]
    names = {field.name for field in dataclasses.fields(make_drafter)}
    return make_drafter(**{name: value for name, value in options.items() if name in names})


def _costs(option: str, drafts: Sequence[Any], kind: str) -> Option:
    """The option ``costs``: with ``option`` = auto, the cost of a round with each draft.

    ``drafts`` are the lengths or trees that auto chooses among, and ``kind`` is the word for one.
    """
    return Option(
        as_costs,
        MEASURED,
        f"with {option}=auto: relative time of a round for each draft {kind} "
        f"({'; '.join(map(str, drafts))}); measured: measure them before the run",
        fits=lambda given: len(given) == len(drafts) and all(0 < x < math.inf for x in given),
        expected=f"times above 0 at {kind}s {', '.join(map(str, drafts))}",
        words=(MEASURED,),
    )


GAMMA = Option(int, 4, "draft length γ: number of draft tokens per round", low=1, high=64)
AUTO_GAMMA = dataclasses.replace(
    GAMMA,
    help=f"{GAMMA.help}; auto: chosen each round by acceptance rate and cost",
    words=(AUTO,),
)
LENGTH_COSTS = _costs("gamma", LENGTHS, "length")
TREE_COSTS = _costs("branching", [",".join(map(str, form)) or 0 for form in TREES], "tree")
BRANCHING_OPTION = Option(
    as_branching,
    (4, 2, 2),
    "number of children of each node, level by level",
    fits=BRANCHING.fits,
    expected=BRANCHING.expected,
    within_vocabulary=True,
)
REPLACEMENT = Option(
    bool, False, "draw the children of a node with replacement, so that some may be equal"
)
BEAM_WIDTH = Option(int, 8, "number of beams W", low=1, high=64, within_vocabulary=True)
JOINT_CHOICES = (
    "warped: the product of the tokens' warped distributions; raw: the product of the unwarped "
    "ones, warped as a whole"
)
JOINT = Option(str, "warped", f"what sampled beams are drawn from; {JOINT_CHOICES}", choices=JOINTS)
CHAIN_OPTIONS = {
    "gamma": AUTO_GAMMA,
    "costs": LENGTH_COSTS,
    "stop": Option(
        str,
        "never",
        "end a draft early: never, before or after its first token that tau1 calls unsure",
        choices=draft.STOPS,
    ),
    "tau1": Option(
        float,
        0.9,
        "with stop=before or after: a token is unsure if the draft model's top probability is "
        "below this",
        low=0,
        high=1,
    ),
    "draft_warp": Option(
        bool,
        True,
        "sample the draft with the target's temperature, top-k and top-p; false: with none",
    ),
}

DRAFTERS: dict[str, PartSpec] = {
    "none": PartSpec(draft.NoDraft, "no draft: one token per target pass"),
    "lookup": PartSpec(
        draft.Lookup,
        "the tokens that followed an earlier occurrence of the row's last n-gram",
        {
            "gamma": dataclasses.replace(AUTO_GAMMA, default=10),
            "costs": LENGTH_COSTS,
            "ngram": Option(int, 3, "longest n-gram to look for, in tokens", low=1, high=8),
        },
    ),
    "suffix": PartSpec(
        draft.Suffix,
        "the tokens that followed the row's last n-gram in any row or earlier request",
        {
            "gamma": dataclasses.replace(AUTO_GAMMA, default=10),
            "costs": LENGTH_COSTS,
            "ngram": Option(int, 8, "longest n-gram to look for, in tokens", low=1, high=64),
            "pool": Option(
                int,
                2**15,
                "number of tokens of rows and earlier requests to search in",
                low=2**8,
                high=2**22,
            ),
        },
    ),
    "chain": PartSpec(
        _model_or_head(draft.Chain, draft.HeadChain),
        "γ tokens in a row, sampled from a draft model",
        CHAIN_OPTIONS,
        needs_draft=True,
        needs_context=True,
        draft_kinds=MODEL_OR_HEAD,
    ),
    "iid": PartSpec(
        _model_or_head(draft.Tree.iid, draft.HeadTree.iid),
        "k independent chains of γ tokens each",
        {"gamma": GAMMA, "chains": Option(int, 4, "number of chains k", low=1, high=64)},
        needs_draft=True,
        needs_context=True,
        draft_kinds=MODEL_OR_HEAD,
    ),
    "tree": PartSpec(
        _model_or_head(draft.Tree, draft.HeadTree),
        "a token tree with a fixed number of children at each level",
        {
            "branching": dataclasses.replace(
                BRANCHING_OPTION,
                help=f"{BRANCHING_OPTION.help}; auto: chosen each round by acceptance rate and "
                "cost",
                words=(AUTO,),
            ),
            "costs": TREE_COSTS,
            "replacement": REPLACEMENT,
        },
        needs_draft=True,
        needs_context=True,
        draft_kinds=MODEL_OR_HEAD,
    ),
    "adaptive": PartSpec(
        _adaptive,
        "the target's own predictions at its adaptive tokens (SDSAT); it needs no draft model",
        {
            "k": Option(
                int,
                0,
                "number of adaptive tokens; 0: as many as the target was tuned with",
                low=0,
                high=MOST,
            ),
            "form": Option(
                str,
                AUTO,
                "draft a chain, or a tree of the most probable tokens; auto: a tree if tokens are "
                "sampled and the rule verifies such trees, else a chain",
                choices=(AUTO, *FORMS),
            ),
            "single": Option(
                bool,
                False,
                "verify a draft and prepare the next one in the same pass, instead of in two",
            ),
            "groups": Option(
                int,
                0,
                "with single=true: for how many accepted lengths (0, 1, …) to prepare the next "
                "draft; 0: for all",
                low=0,
                high=64,
            ),
        },
        needs_tuned=True,
        needs_context=True,
    ),
    "beam": PartSpec(
        draft.Beam,
        "beam search or beam sampling with the draft model",
        {
            "gamma": GAMMA,
            "width": BEAM_WIDTH,
            "verify_beams": Option(
                str,
                "top1",
                "verify the best beam (top1), or all beams as one tree (all)",
                choices=VERIFIED,
            ),
            "joint": JOINT,
        },
        needs_draft=True,
    ),
    "head": PartSpec(
        _head,
        "a draft head on the target's hidden states (EAGLE-3)",
        {
            "tree": Option(
                str,
                AUTO,
                "form of the draft; none: a chain; drawn: a sampled tree of branching children; "
                "dynamic: the budget most probable nodes (EAGLE-2); auto: dynamic if the rule "
                "verifies such trees, else none",
                choices=(AUTO, *_HEAD_DRAFTERS),
            ),
            **CHAIN_OPTIONS,
            "branching": BRANCHING_OPTION,
            "replacement": REPLACEMENT,
            "budget": Option(
                int,
                31,
                "with tree=dynamic: number of draft tokens in the tree",
                low=1,
                high=MAX_NODES - 1,
            ),
            "depth": Option(
                int, 5, "with tree=dynamic: number of levels of the tree", low=1, high=32
            ),
            "width": dataclasses.replace(
                BEAM_WIDTH,
                help="with tree=dynamic: number of nodes that are expanded at each level, and of "
                "children of each",
            ),
        },
        needs_draft=True,
        needs_context=True,
        draft_kinds=(HEAD,),
    ),
}
