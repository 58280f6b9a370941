"""What a drafter, a target distribution, a rule and a method must offer.

All of them are frozen, hashable and hold only static choices; models and arrays come in as
arguments. So one jitted loop per method serves every checkpoint, key and sampling setting.
What has a value here is a default that a class of one's own may leave as it is.

Axis legend: B rows, N draft nodes, P probe nodes, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import jax
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.arguments import FLAG, TEXTS, settle
from specjax.types import DecodeState, Draft, Inputs, TreeShape, Verdict


class Proposal(NamedTuple):
    """A draft, the drafter's next state, and what it cost."""

    draft: Draft
    state: Any = ()
    calls: Int[Array, "B"] | int = 0  # draft-model calls of each row
    passes: Int[Array, ""] | int = 0  # batched draft-model forwards launched


class Drafter(Protocol):
    """Proposes a tree of tokens below the last committed one."""

    name: str  # for messages
    law: str  # how the tokens come about: IID, POINT_MASS, …
    shape: TreeShape  # bounds every draft
    settings: tuple[str, ...] = ()  # names of the scalars that it reads in ``inputs.settings``
    num_probes: int = 0  # probe nodes that ride along in the target's pass
    needs_draft: bool = False  # whether it runs the draft model
    needs_head: bool = False  # whether that is a head on the target's hidden states
    ends_early: bool = False  # chains: most end long before their bound
    keep_logits: bool = False  # whether drafts carry the draft model's raw logits
    usual_rule: str = "speculative"  # what verifies its drafts where no rule is named

    @property
    def slots(self) -> int:
        """Cache slots that a round needs from the root's on."""
        return self.shape.nodes

    def with_logits(self) -> Drafter | None:
        """The same drafter with ``keep_logits``; None where it cannot."""
        return self if self.keep_logits else None

    def raw_rows(self, inputs: Inputs) -> Bool[Array, "B"] | bool:
        """Rows whose draft probabilities are unwarped."""
        return False

    def init(self, inputs: Inputs, state: DecodeState, chunk: int) -> Any:
        """The drafter's state after the prompt; ``chunk`` is the prefill width.

        ``state.drafter_state`` is what the batch before in the same job left (:meth:`carry`).
        """
        return ()

    def carry(self, drafter_state: Any) -> Any:
        """What of its state the next batch of the same job, of as many rows, begins with."""
        return ()

    def taps(self, inputs: Inputs) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads: ``draft.states`` in :meth:`update`."""
        return ()

    def watch(
        self,
        inputs: Inputs,
        state: DecodeState,
        carried: Any,
        first: Int[Array, ""],
        states: Float[Array, "B T L D"] | None,
    ) -> Any:
        """The drafter's state after a pass of the target over T tokens of the prompts.

        ``states`` are what it taps, at the positions from ``first`` on.
        """
        return carried

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
        return carried


class TargetDist(Protocol):
    """The distribution p that the rule holds the draft against."""

    settings: tuple[str, ...] = ()  # names of the scalars that it reads in ``inputs.settings``
    needs_draft: bool = False  # whether it runs the draft model
    needs_draft_logits: bool = False  # whether it reads the drafter's raw logits at every node
    draft_calls: int = 0  # draft-model calls that one round adds

    def standalone(self) -> TargetDist:
        """The same distribution for drafters that give no logits."""
        return self

    def init(self, inputs: Inputs, state: DecodeState, chunk: int) -> Any:
        """Its state after the prompt."""
        return ()

    def log_p(
        self, inputs: Inputs, state: DecodeState, draft: Draft, logits: Float[Array, "B N V"]
    ) -> tuple[Float[Array, "B N V"], Any]:
        """Log-probabilities of the token after each node, and the next ``target_state``."""

    def commit(
        self, inputs: Inputs, state: DecodeState, carried: Any, draft: Draft, verdict: Verdict
    ) -> Any:
        """The state after the verdict, from the one that :meth:`log_p` returned."""
        return carried


@dataclasses.dataclass(frozen=True)
class Rule:
    """An acceptance rule ``(keys[B], draft, log_p[B, N, V], **settings) -> Verdict``.

    Pure and usable alone.

    Attributes:
      laws: the draft laws it is made for; any other is refused before compiling.
      lossless: the emitted sequence then has exactly the law p.
      chain_only: it reads a chain and no tree.
      settings: names of the scalars that it takes.
      extras: what the loop hands it besides: ``raw_log_p`` (the target at temperature 1,
        unwarped), ``joint_raw`` (rows whose joint probabilities are unwarped) and ``written``
        (tokens that each row has written; with it come the rows' keys, not the round's).
    """

    verify: Callable[..., Verdict]
    laws: frozenset[str]
    lossless: bool
    chain_only: bool = True
    settings: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()

    def __post_init__(self):
        settle(self, laws=TEXTS, settings=TEXTS, extras=TEXTS, lossless=FLAG, chain_only=FLAG)
        object.__setattr__(self, "laws", frozenset(self.laws))
        object.__setattr__(self, "__doc__", self.verify.__doc__)

    @property
    def name(self) -> str:
        return self.verify.__name__

    def __call__(
        self, keys: Key[Array, "B"], draft: Draft, log_p: Float[Array, "B N V"], **settings: Any
    ) -> Verdict:
        arguments = (keys, draft, log_p), settings
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments))
        verify = self.verify if traced else _compiled(self.verify)
        return verify(keys, draft, log_p, **settings)

    def __repr__(self) -> str:
        return f"Rule({self.name})"


@functools.cache
def _compiled(verify: Callable[..., Verdict]) -> Callable[..., Verdict]:
    """What a rule called outside jit runs: one program per shape."""
    return jax.jit(verify)


def rule(*, laws: Iterable[str], lossless: bool, **more: Any) -> Callable[[Callable], Rule]:
    """Decorator that makes an acceptance rule of a verify function; see :class:`Rule`."""
    return lambda verify: Rule(verify, laws, lossless, **more)


class Method(Protocol):
    """A decoding method: state in, state out, one round at a time."""

    width: int  # token slots above ``length`` that one round may write
    depth: int = 0  # most draft tokens that a round accepts
    # Tokens stand firm only at the end (beam search): all slots are needed from the start.
    reserves: bool = False
    hosted: bool = False  # its rounds are driven from the host, for the reward needs text

    def init(self, inputs: Inputs, state: DecodeState, chunk: int) -> DecodeState:
        """Fills the caches from the prompt: everything but each row's last token."""

    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        """One round; every live row gains at least one token."""

    def carry(self, state: DecodeState) -> Any:
        """The ``drafter_state`` that the next batch of the same job begins with."""
        return ()
