"""What a drafter, a target distribution, a rule and a method must offer.

All of them are frozen, hashable and hold only static choices; arrays come in as arguments.
So one jitted loop per method serves every checkpoint, key and sampling setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Float, Int, Key

from specjax.types import DecodeState, Draft, Inputs, TreeShape, Verdict


class Proposal(NamedTuple):
    """A draft, the drafter's next state, and what it cost."""

    draft: Draft
    state: Any
    calls: Int[Array, "B"]  # draft-model calls of each row
    passes: Int[Array, ""]  # batched draft-model forwards launched


class Drafter(Protocol):
    """Proposes a tree of tokens below the last committed one.

    ``name`` stands in messages; ``shape`` bounds every draft; ``law`` says how its tokens come
    about; ``num_probes`` is the number of probe nodes that ride along in the target's pass. A
    drafter of chains may have ``ends_early``: most of its drafts end long before their bound.
    """

    name: str
    shape: TreeShape
    law: str
    num_probes: int

    def init(self, inputs: Inputs, state: DecodeState, chunk: int) -> Any:
        """The drafter's state after the prompt; ``chunk`` is the prefill width."""

    def propose(self, inputs: Inputs, state: DecodeState, keys: Key[Array, "B"]) -> Proposal:
        """One draft per row; ``keys`` are the round's keys."""

    def update(
        self,
        inputs: Inputs,
        state: DecodeState,
        carried: Any,
        draft: Draft,
        verdict: Verdict,
        probe_logits: Float[Array, "B P V"] | None,
    ) -> Any:
        """The drafter's state after the verdict, from the one that :meth:`propose` returned.

        ``state`` is that of the round's beginning: the root stands at ``state.length - 1``.
        """


class TargetDist(Protocol):
    """The distribution p that the rule holds the draft against.

    ``needs_draft_logits`` asks the drafter for its raw logits at every node; ``draft_calls``
    is the number of draft-model calls that one round adds; ids from ``vocab_limit`` on never
    occur.
    """

    needs_draft_logits: bool
    draft_calls: int
    vocab_limit: int

    def init(self, inputs: Inputs, state: DecodeState, chunk: int) -> Any: ...

    def log_p(
        self, inputs: Inputs, state: DecodeState, draft: Draft, logits: Float[Array, "B N V"]
    ) -> tuple[Float[Array, "B N V"], Any]:
        """Log-probabilities of the token after each node, and the next ``state.target``."""

    def commit(
        self, inputs: Inputs, state: DecodeState, carried: Any, draft: Draft, verdict: Verdict
    ) -> Any:
        """The state after the verdict, from the one that :meth:`log_p` returned."""


class Rule:
    """An acceptance rule ``(keys[B], draft, log_p[B, N, V], **settings) -> Verdict``.

    Pure and usable alone. ``laws`` are the draft laws the rule is made for (any other is
    refused before compiling); ``lossless`` says that the emitted sequence then has exactly
    the law p; ``chain_only`` that it reads a chain and no tree. ``extras`` name what the loop
    hands it besides: ``raw_log_p`` (the target at temperature 1, unwarped) and ``joint_raw``
    (rows whose joint probabilities are unwarped).
    """

    def __init__(
        self,
        verify: Callable[..., Verdict],
        laws: Iterable[str],
        lossless: bool,
        chain_only: bool = True,
        settings: Iterable[str] = (),
        extras: Iterable[str] = (),
    ):
        self.verify, self.laws, self.lossless = verify, frozenset(laws), lossless
        self.chain_only, self.settings = chain_only, tuple(settings)
        self.extras = tuple(extras)
        self.name, self.__doc__ = verify.__name__, verify.__doc__

    def __call__(
        self, keys: Key[Array, "B"], draft: Draft, log_p: Float[Array, "B N V"], **settings: Any
    ) -> Verdict:
        return self.verify(keys, draft, log_p, **settings)

    def __repr__(self) -> str:
        return f"Rule({self.name})"


def rule(
    *,
    laws: Iterable[str],
    lossless: bool,
    chain_only: bool = True,
    settings: Iterable[str] = (),
    extras: Iterable[str] = (),
) -> Callable[[Callable[..., Verdict]], Rule]:
    """Decorator that makes an acceptance rule of a verify function."""
    return lambda verify: Rule(verify, laws, lossless, chain_only, settings, extras)


class Method(Protocol):
    """A decoding method: state in, state out, one round at a time.

    ``width`` is the number of token slots above ``length`` that one round may write.
    ``reserves``: the slots of the whole budget are needed from the start, for tokens stand
    firm only at the end (beam search).
    """

    width: int
    reserves: bool

    def init(self, inputs: Inputs, state: DecodeState, chunk: int) -> DecodeState:
        """Fills the caches from the prompt: everything but each row's last token."""

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        """One round; every live row gains at least one token."""

    def finalize(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        """After the last round, e.g. picking the best of several hypotheses."""
