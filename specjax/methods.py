"""The table: drafters, target distributions, rules, and the methods composed of them.

One entry here gives a method its command line, its documentation, its place in the benchmark
and its run through the shared tests.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from specjax import draft, verify
from specjax.decode import DraftVerify
from specjax.errors import OptionError, PairError
from specjax.lm import LM
from specjax.protocols import Rule
from specjax.target import Warped


@dataclasses.dataclass(frozen=True)
class Option:
    """One setting of a part. Floats are arrays in the loop (changing one never recompiles);
    everything else is static."""

    kind: type
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
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
            raise OptionError(f"{name}={value}: expected {self.kind.__name__}") from None
        low, high = self.low, self.high
        if (low is not None and not parsed >= low) or (high is not None and not parsed <= high):
            bounds = f"≥ {low}" if high is None else f"from {low} to {high}"
            raise OptionError(f"{name}={value}: expected a number {bounds}")
        if self.choices and parsed not in self.choices:
            raise OptionError(f"{name}={value}: expected one of {', '.join(self.choices)}")
        return parsed


@dataclasses.dataclass(frozen=True)
class Context:
    """The models that parts are built for."""

    target: LM
    draft: LM | None


@dataclasses.dataclass(frozen=True)
class Part:
    """A named drafter, target distribution or rule: how to build it, and its options."""

    build: Callable[..., Any]
    summary: str
    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    needs_draft: bool = False


def _chain(context: Context, gamma: int) -> draft.Chain:
    return draft.Chain(
        model=context.draft.config,
        vocab=context.target.config.vocab_size,
        vocab_limit=min(context.target.vocab_limit, context.draft.vocab_limit),
        gamma=gamma,
    )


def _lookup_draft(context: Context, gamma: int, ngram: int) -> draft.Lookup:
    return draft.Lookup(gamma=gamma, ngram=ngram)


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
    "chain": Part(_chain, "γ tokens from a draft model", {"gamma": GAMMA}, needs_draft=True),
}

TARGET_DISTS: dict[str, Part] = {
    "warped": Part(
        lambda context: Warped(context.target.vocab_limit),
        "the target's own distribution under temperature, top-k and top-p",
    ),
}

RULES: dict[str, Part] = {
    "speculative": Part(lambda context: verify.speculative, "accept with min(1, p/q)"),
    "block": Part(lambda context: verify.block, "accept the longest prefix that passes as a whole"),
}


@dataclasses.dataclass(frozen=True)
class MethodSpec:
    """A method: the names of its parts, option defaults that differ, and where it is from."""

    name: str
    summary: str
    paper: str
    drafter: str
    rule: str
    target_dist: str = "warped"
    lossless: bool = True
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def parts(self) -> tuple[Part, Part, Part]:
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

    def resolve(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """All options with their values; unknown names and bad values are errors."""
        known = self.options
        for name in options:
            if name not in known:
                raise OptionError(f"unknown option {name!r} of method {self.name}"
                                  + _hint(name, known))  # fmt: skip
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
        built = []
        for part in self.parts:
            static = {n: values[n] for n, o in part.options.items() if o.kind is not float}
            built.append(part.build(context, **static))
        drafter, target, rule = built
        settings = {n: v for n, v in values.items() if isinstance(v, float)}
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
