"""The table: drafters, target distributions, rules, and the methods composed of them.

One entry here gives a method its command line, its documentation, its place in the benchmark
and its run through the shared tests.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from specjax import draft, search, verify
from specjax.decode import DraftVerify
from specjax.errors import OptionError, PairError
from specjax.lm import LM
from specjax.protocols import Rule
from specjax.rewards.combined import COMBINATIONS
from specjax.target import Contrastive, Warped
from specjax.types import DETERMINISTIC


def branching(value: Any) -> tuple[int, ...]:
    """Children per level, from ``"4,2,2"`` or a sequence of numbers."""
    parts = value.split(",") if isinstance(value, str) else value
    counts = tuple(int(part) for part in parts)
    if not counts or min(counts) < 1:
        raise ValueError
    return counts


_WANTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    branching: "children per level, each at least 1, such as 4,2,2",
}


@dataclasses.dataclass(frozen=True)
class Option:
    """One setting of a part. Floats are arrays in the loop (changing one never recompiles);
    everything else is static."""

    kind: Callable[[Any], Any]
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    above: float | None = None  # as low, itself excluded
    below: float | None = None
    choices: tuple[str, ...] = ()

    def parse(self, name: str, value: Any) -> Any:
        """The value, from a string or from Python, checked.

        Raises:
          OptionError: a wrong type or a value out of range.
        """
        try:
            if self.kind is bool and isinstance(value, str):
                parsed = {"true": True, "false": False}[value.lower()]
            elif self.kind is int and not isinstance(value, str) and value != int(value):
                raise ValueError
            else:
                parsed = self.kind(value)
        except (ValueError, TypeError, KeyError):
            wanted = _WANTED.get(self.kind, getattr(self.kind, "__name__", "another value"))
            raise OptionError(f"{name}={value}: expected {wanted}") from None
        for bound, sign, holds in (
            (self.low, "≥", lambda x, y: x >= y),
            (self.above, ">", lambda x, y: x > y),
            (self.high, "≤", lambda x, y: x <= y),
            (self.below, "<", lambda x, y: x < y),
        ):
            if bound is not None and not holds(parsed, bound):
                raise OptionError(f"{name}={value}: expected a number {sign} {bound}")
        if self.choices and parsed not in self.choices:
            raise OptionError(f"{name}={value}: expected one of {', '.join(self.choices)}")
        return parsed


@dataclasses.dataclass(frozen=True)
class Context:
    """What parts are built for: the models, the rule, whether the drafter is to keep its logits,
    and whether rows are greedy (defaults may differ; a method is exact either way)."""

    target: LM
    draft: LM | None
    keep_logits: bool = False
    rule: Rule | None = None
    greedy: bool = True
    reward: Any = None  # of a guided method: a specjax.rewards.Fold, or None where it needs text

    @property
    def takes_trees(self) -> bool:
        """Whether the rule verifies a tree whose nodes were chosen rather than drawn."""
        return DETERMINISTIC in self.rule.laws and not self.rule.chain_only

    @property
    def of_draft(self) -> dict[str, Any]:
        """What every drafter with a model of its own needs."""
        return {
            "model": self.draft.config,
            "vocab": self.target.config.vocab_size,
            "vocab_limit": min(self.target.vocab_limit, self.draft.vocab_limit),
        }


@dataclasses.dataclass(frozen=True)
class Part:
    """A named drafter, target distribution or rule: how to build it, and its options.

    ``gives_logits``: a drafter that can hand on its raw logits; ``wants_logits``: a target
    distribution that uses them where it can.
    """

    build: Callable[..., Any]
    summary: str
    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    needs_draft: bool = False
    needs_reward: bool = False
    gives_logits: bool = False
    wants_logits: bool = False


def _chain(context: Context, gamma: int, stop: str, draft_warp: bool) -> draft.Chain:
    return draft.Chain(
        **context.of_draft,
        gamma=gamma,
        stop=stop,
        warped=draft_warp,
        keep_logits=context.keep_logits,
    )


def _tree(context: Context, branching: tuple[int, ...], replacement: bool) -> draft.Tree:
    _check_width("branching", max(branching), context)
    return draft.Tree(**context.of_draft, branching=branching, replacement=replacement)


def _iid(context: Context, gamma: int, chains: int) -> draft.Tree:
    counts = (chains, *(1,) * (gamma - 1))
    return draft.Tree(**context.of_draft, branching=counts, replacement=True)


def _beam(context: Context, gamma: int, width: int, verify_beams: str, joint: str) -> draft.Beam:
    _check_width("width", width, context)
    return draft.Beam(
        **context.of_draft, gamma=gamma, width=width, verify_beams=verify_beams, joint=joint
    )


def _check_width(name: str, width: int, context: Context) -> None:
    if width > context.target.config.vocab_size:
        raise OptionError(
            f"{name}={width} is more than the vocabulary's "
            f"{context.target.config.vocab_size} tokens"
        )


def _lookup_draft(context: Context, gamma: int, ngram: int) -> draft.Lookup:
    return draft.Lookup(gamma=gamma, ngram=ngram)


def _adaptive(
    context: Context, k: int, form: str, single: bool, groups: int
) -> draft.SinglePass | search.TwoPasses:
    ids, vocab = _adaptive_ids(context, k), context.target.config.vocab_size
    if form == "auto":
        tree = context.takes_trees and not (context.greedy or single)
        form = draft.TREE if tree else draft.CHAIN
    if single and form == draft.TREE:
        raise PairError(
            "a single pass drafts a chain, for a group of probes stands behind each of "
            "its nodes: use form=chain, or single=false"
        )
    candidates = draft.Candidates(len(ids), context.target.vocab_limit, form)
    if single:
        every = len(ids) + 1
        return draft.SinglePass(candidates, ids, vocab, min(groups or every, every))
    return search.TwoPasses(draft.Asking(ids, vocab), draft.Answering(candidates))


def _adaptive_ids(context: Context, k: int) -> tuple[int, ...]:
    """The ids of a₁ … a_k; k = 0 is the window that the model was tuned with."""
    trained, source = context.target.config.adaptive_ids, context.target.source
    if not trained:
        raise PairError(
            f"target {source} has no adaptive tokens: tune it with train.sdsat, or "
            "take --target demo-sdsat"
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


def _contrastive(context: Context, variant: str) -> Contrastive:
    own = None if context.keep_logits else context.draft.config
    return Contrastive(context.target.vocab_limit, variant, own)


GAMMA = Option(int, 4, "draft length γ", low=1, high=64)

DRAFTERS: dict[str, Part] = {
    "none": Part(lambda context: draft.NoDraft(), "no draft"),
    "lookup": Part(
        _lookup_draft,
        "what followed the longest matching n-gram",
        {
            "gamma": dataclasses.replace(GAMMA, default=10),
            "ngram": Option(int, 3, "longest n-gram tried", low=1, high=8),
        },
    ),
    "chain": Part(
        _chain,
        "γ tokens from a draft model",
        {
            "gamma": GAMMA,
            "stop": Option(
                str,
                "never",
                "end a draft before or after an unsure token",
                choices=("never", "before", "after"),
            ),
            "tau1": Option(float, 0.9, "a draft is unsure below this probability", low=0, high=1),
            "draft_warp": Option(bool, True, "warp the draft as the target is warped"),
        },
        needs_draft=True,
        gives_logits=True,
    ),
    "iid": Part(
        _iid,
        "k independent chains of γ tokens",
        {"gamma": GAMMA, "chains": Option(int, 4, "number of chains k", low=1, high=64)},
        needs_draft=True,
    ),
    "tree": Part(
        _tree,
        "a token tree, so many children per level",
        {
            "branching": Option(branching, (4, 2, 2), "children per node, level by level"),
            "replacement": Option(bool, False, "draw siblings with replacement"),
        },
        needs_draft=True,
    ),
    "adaptive": Part(
        _adaptive,
        "the target's own answers at its adaptive tokens (SDSAT)",
        {
            "k": Option(int, 0, "adaptive tokens; 0: as trained", low=0, high=draft.MOST),
            "form": Option(
                str,
                "auto",
                "a chain, or a tree of candidates; auto: a tree where tokens are drawn",
                choices=("auto", "chain", "tree"),
            ),
            "single": Option(bool, False, "verify and draft in one pass"),
            "groups": Option(int, 0, "groups of a single pass; 0: all", low=0, high=64),
        },
    ),
    "beam": Part(
        _beam,
        "beams of the draft model, searched or sampled",
        {
            "gamma": GAMMA,
            "width": Option(int, 8, "number of beams W", low=1, high=64),
            "verify_beams": Option(
                str, "top1", "verify the best beam, or all as a tree", choices=("top1", "all")
            ),
            "joint": Option(
                str, "warped", "which probabilities make up a joint", choices=("warped", "raw")
            ),
        },
        needs_draft=True,
    ),
}

TARGET_DISTS: dict[str, Part] = {
    "warped": Part(
        lambda context: Warped(context.target.vocab_limit),
        "the target's own distribution under temperature, top-k and top-p",
    ),
    "contrastive": Part(
        _contrastive,
        "what the target says more than the draft model does",
        {
            "variant": Option(str, "improved", "the score", choices=("original", "improved")),
            "alpha": Option(float, 0.5, "plausible: so much of the likeliest", above=0, high=1),
            "beta": Option(float, 0.5, "weight of the amateur (improved)", low=0),
        },
        needs_draft=True,
        wants_logits=True,
    ),
}

RULES: dict[str, Part] = {
    "speculative": Part(lambda context: verify.speculative, "accept with min(1, p/q)"),
    "block": Part(lambda context: verify.block, "accept the longest prefix that passes as a whole"),
    "spectr": Part(lambda context: verify.spectr, "k candidates, each with min(1, p/(ρ q))"),
    "specinfer": Part(lambda context: verify.specinfer, "siblings in turn, a residual after each"),
    "match": Part(lambda context: verify.match, "draw from p, follow the child that carries it"),
    "mentored": Part(
        lambda context: verify.mentored,
        "accept as often as a bound on KL(p‖π) allows",
        {"max_kl": Option(float, 0.1, "bound on each token's KL, nats", low=0)},
    ),
    "joint": Part(
        lambda context: verify.joint,
        "accept the longest path of joint ratio above τ",
        {"tau": Option(float, 0.1, "threshold on min(1, P/Q)", low=0, below=1)},
    ),
    "bild": Part(
        lambda context: verify.bild,
        "roll back at the first token the target finds unlikely",
        {"tau2": Option(float, 1.0, "largest −log p(x) kept, nats", low=0)},
    ),
}


def _beam_search(context: Context, beams: int) -> search.BeamSearch:
    _check_width("beams", beams, context)
    return search.BeamSearch(context.target.config, context.target.vocab_limit, beams)


def _mtjd(context: Context, block: int, width: int) -> search.MTJD:
    _check_width("width", width, context)
    return search.MTJD(context.target.config, context.target.vocab_limit, block, width)


def _lookahead(context: Context, k: int, d: int, combine: str) -> search.Lookahead:
    _check_width("k", k, context)
    return search.Lookahead(context.target.config, context.target.vocab_limit, k, d, context.reward)


def _draft_lookahead(context: Context, k: int, d: int, combine: str) -> search.Lookahead:
    found, of_draft = _lookahead(context, k, d, combine), context.of_draft
    return dataclasses.replace(found, draft=of_draft["model"], draft_limit=of_draft["vocab_limit"])


def _cdsl(
    context: Context, k: int, d: int, b: int, accept: str, keep_verified: bool, combine: str
) -> search.CDSL:
    _check_width("k", k, context)
    return search.CDSL(
        context.target.config,
        context.target.vocab_limit,
        context.draft.config,
        context.of_draft["vocab_limit"],
        context.reward,
        k,
        d,
        b,
        accept,
        keep_verified,
    )


LOOKAHEAD = {
    "k": Option(int, 3, "candidates for the next token", low=1, high=64),
    "d": Option(int, 3, "lookahead tokens", low=1, high=64),
    "combine": Option(
        str, "sum", "of several rewards: their sum, or product", choices=COMBINATIONS
    ),
}

SEARCHES: dict[str, Part] = {
    "beam": Part(
        _beam_search,
        "the W likeliest hypotheses side by side",
        {"beams": Option(int, 4, "number of hypotheses W", low=1, high=64)},
    ),
    "mtjd": Part(
        _mtjd,
        "blocks of K tokens from the joint",
        {
            "block": Option(int, 4, "tokens of a block K", low=1, high=16),
            "width": Option(int, 8, "beams that approximate the joint", low=1, high=64),
        },
    ),
    "lookahead": Part(
        _lookahead,
        "each token by the reward of the target's lookaheads",
        LOOKAHEAD,
        needs_reward=True,
    ),
    "draft-lookahead": Part(
        _draft_lookahead,
        "each token by the reward of the draft model's lookaheads",
        LOOKAHEAD,
        needs_draft=True,
        needs_reward=True,
    ),
    "cdsl": Part(
        _cdsl,
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
    ),
}


@dataclasses.dataclass(frozen=True)
class MethodSpec:
    """A method: the names of its parts, option defaults that differ, and where it is from.

    A method is a drafter, a rule and a target distribution, or one entry of ``SEARCHES``.
    """

    name: str
    summary: str
    paper: str
    drafter: str = ""
    rule: str = ""
    target_dist: str = "warped"
    search: str = ""
    lossless: bool = True
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def parts(self) -> tuple[Part, ...]:
        if self.search:
            return (SEARCHES[self.search],)
        return (
            _lookup("drafter", DRAFTERS, self.drafter),
            _lookup("target distribution", TARGET_DISTS, self.target_dist),
            _lookup("rule", RULES, self.rule),
        )

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
        """All options with their values; unknown names and bad values are errors."""
        known = self.options
        for name in options:
            if name not in known:
                raise OptionError(
                    f"unknown option {name!r} of method {self.name}" + _hint(name, known)
                )
        return {n: o.parse(n, options.get(n, o.default)) for n, o in known.items()}

    def build(self, context: Context, options: Mapping[str, Any]) -> tuple[Any, dict[str, float]]:
        """The method, and the float settings that go into the loop as arrays.

        Raises:
          PairError: a draft model is missing, or the parts do not fit together.
          OptionError: as :meth:`resolve`.
        """
        values = self.resolve(options)
        if self.needs_draft and context.draft is None:
            raise PairError(f"method {self.name} needs a draft model: give --draft (or draft=)")
        keep = any(p.gives_logits for p in self.parts) and any(p.wants_logits for p in self.parts)
        context = dataclasses.replace(context, keep_logits=keep)

        def make(part: Part, context: Context):
            static = {n: values[n] for n, o in part.options.items() if o.kind is not float}
            return part.build(context, **static)

        settings = {n: v for n, v in values.items() if isinstance(v, float)}
        if self.search:
            return make(self.parts[0], context), settings
        rule = make(self.parts[2], context)
        context = dataclasses.replace(context, rule=rule)
        drafter, target = (make(part, context) for part in self.parts[:2])
        if isinstance(drafter, search.TwoPasses):
            return search.TwoStep(context.target.config, *drafter, target, rule), settings
        return DraftVerify(context.target.config, drafter, target, rule), settings


METHODS: dict[str, MethodSpec] = {
    spec.name: spec
    for spec in (
        MethodSpec(
            "autoregressive",
            "one token per target pass: greedy, or drawn under temperature, top-k and top-p",
            "the baseline",
            drafter="none",
            rule="speculative",
        ),
        MethodSpec(
            "beam",
            "beam search, or beam sampling at a temperature",
            "Hugging Face num_beams",
            search="beam",
            lossless=False,
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
            lossless=False,
            defaults={"gamma": 10, "stop": "before"},
        ),
        MethodSpec(
            "contrastive",
            "each token from what the target says more than the draft model",
            "Li et al. 2023; O'Brien and Lewis 2023",
            drafter="none",
            rule="speculative",
            target_dist="contrastive",
        ),
        MethodSpec(
            "scd",
            "speculative contrastive decoding: the amateur is the draft",
            "Yuan et al. 2024 (SCD)",
            drafter="chain",
            rule="speculative",
            target_dist="contrastive",
            defaults={"draft_warp": False},
        ),
        MethodSpec(
            "block-scd",
            "contrastive decoding with block verification",
            "a pair that no paper has",
            drafter="chain",
            rule="block",
            target_dist="contrastive",
            defaults={"draft_warp": False},
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
            lossless=False,
        ),
        MethodSpec(
            "mentored",
            "speculative with a bounded deviation from p, for more acceptance",
            "Tran-Thien 2023 (mentored decoding)",
            drafter="chain",
            rule="mentored",
            lossless=False,
        ),
        MethodSpec(
            "mtjd",
            "several tokens at a time from the target's joint distribution",
            "Qin et al. 2024 (MTJD)",
            search="mtjd",
            lossless=False,
        ),
        MethodSpec(
            "mtad",
            "the best beam of the draft, accepted by its joint probability",
            "Qin et al. 2024 (MTAD)",
            drafter="beam",
            rule="joint",
            lossless=False,
        ),
        MethodSpec(
            "cdlh",
            "greedy, each token by the reward of what the target would say after it",
            "Lu et al. 2022; Nakshatri et al. 2025, §2.1",
            search="lookahead",
            lossless=False,
        ),
        MethodSpec(
            "cdlh-appx",
            "cdlh with the draft model's lookaheads",
            "Nakshatri et al. 2025, §3.1",
            search="draft-lookahead",
            lossless=False,
        ),
        MethodSpec(
            "cdsl",
            "verified drafts while the reward is content, lookaheads where it is not",
            "Nakshatri et al. 2025 (CDSL)",
            search="cdsl",
            lossless=False,
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
    return _lookup("method", METHODS, name)


def compose(drafter: str, rule: str, target_dist: str = "warped") -> MethodSpec:
    """An unnamed method of any drafter, rule and target distribution of the tables."""
    name = f"{drafter}+{rule}" + ("" if target_dist == "warped" else f"+{target_dist}")
    spec = MethodSpec(name, "composed by name", "", drafter, rule, target_dist)
    chosen = spec.parts[2].build(None)
    return dataclasses.replace(spec, lossless=isinstance(chosen, Rule) and chosen.lossless)


def _lookup(kind: str, table: Mapping[str, Any], name: str) -> Any:
    if name not in table:
        raise OptionError(f"unknown {kind} {name!r}" + _hint(name, table))
    return table[name]


def _hint(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(known)}" if known else "; it has none"
