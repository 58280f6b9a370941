"""The parts that methods are made of, by name: drafters, target distributions, rules, searches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from specjax import draft, search, verify
from specjax._util.arguments import BRANCHING, MOST_NODES, branching, costs, shown
from specjax._util.errors import OptionError, PairError
from specjax.core.protocols import Drafter, Rule, TargetDist
from specjax.core.types import DETERMINISTIC
from specjax.draft.adaptive import CHAIN, FORMS, MOST, TREE
from specjax.draft.auto_length import LENGTHS, TREES
from specjax.draft.beam import JOINTS, VERIFIED
from specjax.lm import LM
from specjax.registry.options import AUTO, MEASURED, REQUIRED, Option, hint
from specjax.rewards import Fold
from specjax.rewards.combined import COMBINATIONS
from specjax.search.beam import SAMPLED
from specjax.target import IMPROVED, ORIGINAL, VARIANTS, Contrastive, Warped


class Context(NamedTuple):
    """What a method is built for: the models, whether rows are greedy (defaults may differ; a
    method is exact either way), and the reward of a guided one, None where it needs text."""

    target: LM
    draft: LM | None
    greedy: bool = True
    reward: Fold | None = None
    rule: Rule | None = None  # that is to verify a drafter's drafts


WHOLE, HEAD = "whole", "head"  # kinds of draft models
BOTH = (WHOLE, HEAD)


@dataclasses.dataclass(frozen=True)
class PartSpec:
    """How to make a part of its static options, by name; ``bound`` ones get the context first."""

    make: Callable[..., Any]
    summary: str
    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    needs_draft: bool = False
    needs_reward: bool = False
    bound: bool = False
    drafts: tuple[str, ...] = (WHOLE,)  # kinds of draft models that it runs

    def build(self, context: Context, values: Mapping[str, Any]) -> Any:
        static = {
            name: values[name]
            for name, option in self.options.items()
            if option.kind not in (float, costs) and not option.presets
        }
        return self.make(context, **static) if self.bound else self.make(**static)


def _rule(rule: Rule, summary: str, options: Mapping[str, Option] | None = None) -> PartSpec:
    return PartSpec(lambda: rule, summary, options or {})


class TwoPasses(NamedTuple):
    """The drafters of a method of two passes, :class:`specjax.search.TwoStep`."""

    probe: draft.ProbePass
    verify: draft.VerifyPass


def _adaptive(
    context: Context, k: int, form: str, single: bool, groups: int
) -> draft.SinglePass | TwoPasses:
    ids = _adaptive_ids(context.target, k)
    if form == "auto":
        chosen = DETERMINISTIC in context.rule.accepts and not context.rule.chain_only
        form = TREE if chosen and not (context.greedy or single) else CHAIN
    if single and form == TREE:
        raise PairError(
            "a single pass drafts a chain, for a group of probes stands behind each of "
            "its nodes: use form=chain, or single=false"
        )
    candidates = draft.Candidates(len(ids), form)
    if single:
        every = len(ids) + 1
        return draft.SinglePass(candidates, ids, min(groups or every, every))
    return TwoPasses(draft.ProbePass(ids), draft.VerifyPass(candidates))


def _adaptive_ids(target: LM, k: int) -> tuple[int, ...]:
    """The ids of a₁ … a_k; k = 0 is the window that the model was tuned with."""
    trained, source = target.config.adaptive_ids, target.source
    if not trained:
        raise PairError(
            f"target {source} has no adaptive tokens: tune it with train.sdsat, name those it was "
            "tuned with in config.json's adaptive_ids, or take --target demo-sdsat"
        )
    k = k or len(trained)
    if len(set(trained)) == 1:
        return (trained[0],) * k
    if k > len(trained):
        raise OptionError(
            f"k={k}: target {source} was tuned with {len(trained)} distinct adaptive "
            "tokens, and only a repeated one stretches"
        )
    return trained[:k]


def _either(model: Callable[..., Any], head: Callable[..., Any]) -> Callable[..., Any]:
    """Of a whole draft model, or of a head: what the draft is decides."""
    return lambda context, **options: (head if context.draft.is_head else model)(**options)


def _head(context: Context, tree: str, **options: Any) -> Drafter:
    """The drafter of a head whose options are those of every form: each takes its own."""
    if tree == "auto":
        chosen = DETERMINISTIC in context.rule.accepts and not context.rule.chain_only
        tree = "dynamic" if chosen else "none"
    form = {"none": draft.HeadChain, "drawn": draft.HeadTree, "dynamic": draft.HeadBest}[tree]
    names = {field.name for field in dataclasses.fields(form)}
    return form(**{name: value for name, value in options.items() if name in names})


NODES = "children per node, level by level"
GAMMA = Option(int, 4, "draft length γ", low=1, high=64)
AUTO_GAMMA = dataclasses.replace(GAMMA, help="draft length γ; auto: by cost", words=(AUTO,))


def _cost(option: str, choices: Sequence[Any], of: str) -> Option:
    """Costs by which ``option``, where it is auto, chooses one of ``choices``."""
    return Option(
        costs,
        MEASURED,
        f"with {option}=auto: relative time of a round of each draft {of}",
        fits=lambda given: len(given) == len(choices) and all(0 < x < math.inf for x in given),
        wanted=f"times above 0 at {of}s {', '.join(map(str, choices))}",
        words=(MEASURED,),
    )


COST = _cost("gamma", LENGTHS, "length")
TREE_COST = _cost("branching", [",".join(map(str, form)) or 0 for form in TREES], "tree")
WIDTH = Option(int, 8, "number of beams W", low=1, high=64, within_vocabulary=True)
JOINT = Option(
    str,
    "warped",
    "of warped conditionals, or raw and drawn warped as a whole",
    choices=JOINTS,
)

DRAFTERS: dict[str, PartSpec] = {
    "none": PartSpec(draft.NoDraft, "no draft"),
    "lookup": PartSpec(
        draft.Lookup,
        "what followed the longest matching n-gram",
        {
            "gamma": dataclasses.replace(AUTO_GAMMA, default=10),
            "costs": COST,
            "ngram": Option(int, 3, "longest n-gram tried", low=1, high=8),
        },
    ),
    "suffix": PartSpec(
        draft.Suffix,
        "what followed the longest known ending in any row or earlier request of the job",
        {
            "gamma": dataclasses.replace(AUTO_GAMMA, default=10),
            "costs": COST,
            "ngram": Option(int, 8, "longest n-gram tried", low=1, high=64),
            "pool": Option(int, 2**15, "tokens remembered", low=2**8, high=2**22),
        },
    ),
    "chain": PartSpec(
        _either(draft.Chain, draft.HeadChain),
        "γ tokens from a draft model",
        {
            "gamma": AUTO_GAMMA,
            "costs": COST,
            "stop": Option(
                str,
                "never",
                "end a draft before or after an unsure token",
                choices=draft.STOPS,
            ),
            "tau1": Option(float, 0.9, "a draft is unsure below this probability", low=0, high=1),
            "draft_warp": Option(bool, True, "warp the draft as the target is warped"),
        },
        needs_draft=True,
        bound=True,
        drafts=BOTH,
    ),
    "iid": PartSpec(
        _either(draft.Tree.iid, draft.HeadTree.iid),
        "k independent chains of γ tokens",
        {"gamma": GAMMA, "chains": Option(int, 4, "number of chains k", low=1, high=64)},
        needs_draft=True,
        bound=True,
        drafts=BOTH,
    ),
    "tree": PartSpec(
        _either(draft.Tree, draft.HeadTree),
        "a token tree, so many children per level",
        {
            "branching": Option(
                branching,
                (4, 2, 2),
                f"{NODES}; auto: by cost",
                fits=BRANCHING.fits,
                wanted=BRANCHING.wanted,
                words=(AUTO,),
                within_vocabulary=True,
            ),
            "costs": TREE_COST,
            "replacement": Option(bool, False, "draw siblings with replacement"),
        },
        needs_draft=True,
        bound=True,
        drafts=BOTH,
    ),
    "adaptive": PartSpec(
        _adaptive,
        "the target's own answers at its adaptive tokens (SDSAT)",
        {
            "k": Option(int, 0, "adaptive tokens; 0: as trained", low=0, high=MOST),
            "form": Option(
                str,
                "auto",
                "a chain, or a tree of candidates; auto: a tree where tokens are drawn",
                choices=("auto", *FORMS),
            ),
            "single": Option(bool, False, "verify and draft in one pass"),
            "groups": Option(int, 0, "groups of a single pass; 0: all", low=0, high=64),
        },
        bound=True,
    ),
    "beam": PartSpec(
        draft.Beam,
        "beams of the draft model, searched or sampled",
        {
            "gamma": GAMMA,
            "width": WIDTH,
            "verify_beams": Option(
                str, "top1", "verify the best beam, or all as a tree", choices=VERIFIED
            ),
            "joint": JOINT,
        },
        needs_draft=True,
    ),
}

_CHAIN, _TREE = DRAFTERS["chain"].options, DRAFTERS["tree"].options
DRAFTERS["head"] = PartSpec(
    _head,
    "a head on the target's hidden states (EAGLE-3)",
    {
        "tree": Option(
            str,
            "auto",
            "none: a chain; drawn: branching; dynamic: the likeliest; auto: dynamic or none",
            choices=("auto", "none", "drawn", "dynamic"),
        ),
        **_CHAIN,
        "branching": dataclasses.replace(_TREE["branching"], help=NODES, words=()),
        "replacement": _TREE["replacement"],
        "budget": Option(int, 31, "nodes of a dynamic tree", low=1, high=MOST_NODES - 1),
        "depth": Option(int, 5, "depth of a dynamic tree", low=1, high=32),
        "width": dataclasses.replace(
            WIDTH, help="nodes expanded at each depth, and their children"
        ),
    },
    needs_draft=True,
    bound=True,
    drafts=(HEAD,),
)

# Yuan et al. 2024: Table 2, whose α serves both variants, the variant that Table 1 has ahead, and
# Appendix A.2: the amateur draws at temperature 1.
SCD_TASKS = {
    "wikitext": {"variant": ORIGINAL, "alpha": 0.1, "beta": 0.5, "draft_warp": False},
    "alpacaeval": {"variant": IMPROVED, "alpha": 0.5, "beta": 0.5, "draft_warp": False},
    "gsm8k": {"variant": IMPROVED, "alpha": 0.5, "beta": 1.0, "draft_warp": False},
    "humaneval": {"variant": ORIGINAL, "alpha": 0.5, "beta": 0.5, "draft_warp": False},
}

TARGET_DISTS: dict[str, PartSpec] = {
    "warped": PartSpec(Warped, "the target's own distribution under temperature, top-k and top-p"),
    "contrastive": PartSpec(
        Contrastive,
        "what the target says more than the draft model does",
        {
            "preset": Option.preset("the SCD paper's options of a task", SCD_TASKS),
            "variant": Option(str, IMPROVED, "the score", choices=VARIANTS),
            "alpha": Option(float, 0.5, "plausible: so much of the likeliest", above=0, high=1),
            "beta": Option(float, 0.5, "weight of the amateur (improved)", low=0),
        },
        needs_draft=True,
        drafts=BOTH,
    ),
}

RULES: dict[str, PartSpec] = {
    "speculative": _rule(verify.speculative, "accept with min(1, p/q)"),
    "block": _rule(verify.block, "accept the longest prefix that passes as a whole"),
    "spectr": _rule(verify.spectr, "k candidates, each with min(1, p/(ρ q))"),
    "specinfer": _rule(verify.specinfer, "siblings in turn, a residual after each"),
    "match": _rule(verify.match, "draw from p, follow the child that carries it"),
    "mentored": _rule(
        verify.mentored,
        "accept as often as a bound on KL(p‖π) allows",
        {"max_kl": Option(float, 0.1, "bound on each token's KL, nats", low=0)},
    ),
    "joint": _rule(
        verify.joint,
        "accept the longest path of joint ratio above τ",
        {"tau": Option(float, 0.1, "threshold on min(1, P/Q)", low=0, below=1)},
    ),
    "bild": _rule(
        verify.bild,
        "roll back at the first token the target finds unlikely",
        {"tau2": Option(float, 1.0, "largest −log p(x) kept, nats", low=0)},
    ),
}


def _mtjd(context: Context, block: int, width: int, joint: str) -> search.MTJD:
    return search.MTJD.over(context.target.config.vocab_size, block, width, joint)


def _guided(make: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    """``combine`` is of the reward itself."""
    return lambda context, combine, **options: make(context.reward, **options, **fixed)


LOOKAHEAD = {
    "k": Option(int, 3, "candidates for the next token", low=1, high=64, within_vocabulary=True),
    "d": Option(int, 3, "lookahead tokens", low=1, high=64),
    "combine": Option(
        str, "sum", "of several rewards: their sum, or product", choices=COMBINATIONS
    ),
}

SEARCHES: dict[str, PartSpec] = {
    "beam": PartSpec(
        search.BeamSearch,
        "the W likeliest hypotheses side by side",
        {
            "beams": dataclasses.replace(WIDTH, default=4, help="number of hypotheses W"),
            "joint": Option(
                str,
                "raw",
                f"{JOINT.help}; or as transformers samples",
                choices=SAMPLED,
            ),
        },
    ),
    "mtjd": PartSpec(
        _mtjd,
        "blocks of K tokens from the joint",
        {
            "block": Option(int, 4, "tokens of a block K", low=1, high=16),
            "width": dataclasses.replace(WIDTH, help="beams that approximate the joint"),
            "joint": dataclasses.replace(JOINT, default="raw"),
        },
        bound=True,
    ),
    "lookahead": PartSpec(
        _guided(search.Lookahead),
        "each token by the reward of the target's lookaheads",
        LOOKAHEAD,
        needs_reward=True,
        bound=True,
    ),
    "draft-lookahead": PartSpec(
        _guided(search.Lookahead, drafts=True),
        "each token by the reward of the draft model's lookaheads",
        LOOKAHEAD,
        needs_draft=True,
        needs_reward=True,
        bound=True,
    ),
    "cdsl": PartSpec(
        _guided(search.CDSL),
        "verified drafts by their reward, else tokens by lookaheads",
        LOOKAHEAD
        | {
            "b": Option(int, 1, "tokens of the target tried where drafts fail", low=0, high=16),
            "a_t": Option(float, 0.3, "enough of a draft is accepted from here on", low=0, high=1),
            "r_t": Option(float, 0.3, "a reward is good from here on", low=-1e9, high=1e9),
            "accept": Option(str, "hard", "how draft tokens are verified", choices=search.ACCEPTS),
            "keep_verified": Option(bool, True, "keep verified tokens where a or R is too low"),
        },
        needs_draft=True,
        needs_reward=True,
        bound=True,
    ),
}


def presets() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Every preset: the part that declares it, ``option=name``, and what it fills in."""
    for table in (DRAFTERS, TARGET_DISTS, RULES, SEARCHES):
        for part_name, part in table.items():
            for option_name, option in part.options.items():
                for name, filled in option.presets.items():
                    yield part_name, f"{option_name}={name}", filled


# Every setting that some part reads, for parts that are handed over as objects.
_SETTINGS = {
    name: option
    for table in (DRAFTERS, TARGET_DISTS, RULES)
    for part in table.values()
    for name, option in part.options.items()
    if option.kind is float
}


def part_of(
    kind: str, table: Mapping[str, PartSpec], part: str | Drafter | TargetDist | Rule
) -> PartSpec:
    """The part of a name, or of an object; settings of one's own have no default."""
    if isinstance(part, str):
        return lookup(kind, table, part)
    options = {name: _SETTINGS.get(name, Option(float, REQUIRED, "")) for name in part.settings}
    if isinstance(part, Rule):
        return PartSpec(lambda: part, "", options)
    drafts = (HEAD,) if getattr(part, "needs_head", False) else (WHOLE,)
    drafts = BOTH if isinstance(part, Contrastive) else drafts
    return PartSpec(lambda: part, "", options, part.needs_draft, drafts=drafts)


def lookup(kind: str, table: Mapping[str, Any], name: str) -> Any:
    """An entry by name.

    Raises:
      OptionError: there is none; names the nearest.
    """
    if not isinstance(name, str) or name not in table:
        raise OptionError(f"unknown {kind} {shown(name)!r}" + hint(shown(name), table))
    return table[name]
