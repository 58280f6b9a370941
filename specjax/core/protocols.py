"""What a drafter, a target distribution, a rule and a method must offer.

All of them are frozen, hashable and hold only static choices. Models and arrays come in as
arguments. So one jitted loop per method serves every checkpoint, key and sampling setting.
A value given here is a default: a class of your own may leave it as it is.

Axis legend: B rows, N draft nodes, P probe nodes, L auxiliary layers, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import jax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Key

from specjax._util.arguments import FLAG, TEXTS, validate_fields
from specjax._util.errors import OptionError, PairError
from specjax.core.sampling import Sampling
from specjax.core.types import SAMPLINGS, DecodeState, Draft, Inputs, TreeShape, Verdict


class Proposal(NamedTuple):
    """A draft, the drafter's next state, what it cost, and how good it is.

    ``confidence`` is an index of the drafter's ``prior_acceptance``, −1 for a row without a draft.
    None: all drafts have the first one. It may depend on what is written, not on what is drawn.
    """

    draft: Draft
    state: Any = ()
    calls: Int[Array, "B"] | int = 0  # draft-model calls of each row
    passes: Int[Array, ""] | int = 0  # batched draft-model forwards launched
    confidence: Int[Array, "B"] | None = None


class Drafter(Protocol):
    """Proposes a tree of tokens below the last committed one.

    :meth:`propose` is all that a drafter must define, with ``name``, ``sampling`` and ``shape``.
    """

    name: str  # for messages
    sampling: str  # how its tokens are sampled: IID, POINT_MASS, …
    shape: TreeShape  # bounds every draft
    settings: tuple[str, ...] = ()  # names of the scalars that it reads in ``inputs.settings``
    num_probes: int = 0  # probe nodes that ride along in the target's pass
    needs_draft: bool = False  # whether it runs the draft model
    needs_head: bool = False  # whether its draft model is a head on the target's hidden states
    ends_early: bool = False  # whether most of its chains end long before ``shape.depth``
    keep_logits: bool = False  # whether drafts carry the draft model's raw logits
    usual_rule: str = "speculative"  # what verifies its drafts where no rule is named
    # How often a drafted token is expected to be accepted, by :attr:`Proposal.confidence`. Draft
    # lengths that follow costs begin with it.
    prior_acceptance: tuple[float, ...] = (0.85,)
    # Whether devices may have shares of the draft's probabilities (see specjax.core.vocabulary).
    splits_vocabulary: bool = False

    @property
    def round_positions(self) -> int:
        """Cache positions that one draft may write, from the root's position on."""
        return self.shape.nodes

    def with_logits(self) -> Drafter | None:
        """The same drafter with ``keep_logits``; None if it cannot."""
        return self if self.keep_logits else None

    def raw_rows(self, inputs: Inputs) -> Bool[Array, "B"] | bool:
        """Rows whose draft probabilities are unwarped."""
        return False

    def init(self, inputs: Inputs, state: DecodeState) -> Any:
        """The drafter's state before the prompt, its caches empty."""
        return ()

    def aux_layers(self, inputs: Inputs) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads, as ``draft.aux_states`` in :meth:`update`."""
        return ()

    def prefill_chunk(
        self,
        inputs: Inputs,
        state: DecodeState,
        tokens: Int[Array, "B N"],
        start: Int[Array, "B"],
        aux_states: Float[Array, "B N L D"] | None,
    ) -> Any:
        """Its state after N more tokens of each row's prompt, from position ``start`` on.

        ``aux_states`` are the inputs of its auxiliary layers at these tokens. A position may be
        prefilled again: the later pass counts.
        """
        return state.drafter_state

    def on_slot_reuse(self, before: DecodeState, state: DecodeState) -> Any:
        """Its state when the rows of ``state`` take the batch slots of those in ``before``.

        By default nothing of the earlier requests is left.
        """
        return state.drafter_state

    @abstractmethod
    def propose(self, inputs: Inputs, state: DecodeState, keys: Key[Array, "B"]) -> Proposal:
        """One draft per row; ``keys`` are the round's keys.

        The root of each draft is the row's last token, at position ``state.length - 1``.
        """
        raise NotImplementedError

    def update(
        self,
        inputs: Inputs,
        state: DecodeState,
        carried: Any,
        draft: Draft,
        verdict: Verdict,
        probe_logits: Float[Array, "B P V"] | None,
    ) -> Any:
        """The drafter's state after the verdict; ``carried`` is what :meth:`propose` returned.

        ``state`` is that of the round's beginning: the root is at ``state.length - 1``.
        """
        return carried


class TargetDist(Protocol):
    """The distribution p against which the rule verifies a draft.

    :meth:`log_p` is all that it must define.
    """

    settings: tuple[str, ...] = ()  # names of the scalars that it reads in ``inputs.settings``
    needs_draft: bool = False  # whether it runs the draft model
    needs_draft_logits: bool = False  # whether it reads the drafter's raw logits at every node
    draft_calls: int = 0  # draft-model calls that one round adds
    target_calls: int = 0  # target passes that one round adds to the one that verifies
    extra_positions: int = 0  # cache positions that it needs beyond a row's own tokens
    # Whether it applies the settings of a row's path (:func:`specjax.target.node_law`).
    follows_paths: bool = False
    # Whether devices may have shares of the logits (see specjax.core.vocabulary).
    splits_vocabulary: bool = False

    def standalone(self) -> TargetDist:
        """The same distribution for drafters that give no logits."""
        return self

    def init(self, inputs: Inputs, state: DecodeState) -> Any:
        """Its state before the prompt, its caches empty."""
        return ()

    def prefill_chunk(
        self, inputs: Inputs, carried: Any, tokens: Int[Array, "B N"], start: Int[Array, "B"]
    ) -> Any:
        """Its state after N more tokens of each row's prompt, from position ``start`` on."""
        return carried

    @abstractmethod
    def log_p(
        self, inputs: Inputs, state: DecodeState, draft: Draft, logits: Float[Array, "B N V"]
    ) -> tuple[Float[Array, "B N V"], Any]:
        """Log-probabilities of the token after each node, and the next ``target_state``.

        ``logits`` are the target model's at each node, float32. The result is float32, too.
        """
        raise NotImplementedError

    def commit(
        self, inputs: Inputs, state: DecodeState, carried: Any, draft: Draft, verdict: Verdict
    ) -> Any:
        """The state after the verdict; ``carried`` is what :meth:`log_p` returned."""
        return carried


@dataclasses.dataclass(frozen=True)
class Rule:
    """An acceptance rule ``(keys[B], draft, log_p[B, N, V], **settings) -> Verdict``.

    Pure and usable alone, also under ``jit``, ``vmap`` and ``grad``.

    Attributes:
      accepts: how a draft may be sampled for this rule; any other draft is refused.
      lossless: whether the emitted sequence has exactly the distribution p.
      chain_only: whether it verifies only chains, not trees.
      settings: names of the scalars that it takes.
      extras: further arguments that it gets from the loop. ``raw_log_p``: the target at
        temperature 1, unwarped. ``joint_raw``: rows whose joint probabilities are unwarped.
        ``written``: how many new tokens each row has. A rule with ``written`` gets the rows' own
        keys instead of the round's.
      splits_vocabulary: whether devices may have shares of ``log_p`` (see
        :mod:`specjax.core.vocabulary`).
    """

    verify: Callable[..., Verdict]
    accepts: frozenset[str]
    lossless: bool
    chain_only: bool = True
    settings: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    splits_vocabulary: bool = False

    def __post_init__(self):
        flags = {"lossless": FLAG, "chain_only": FLAG, "splits_vocabulary": FLAG}
        validate_fields(self, accepts=TEXTS, settings=TEXTS, extras=TEXTS, **flags)
        object.__setattr__(self, "accepts", frozenset(self.accepts))
        for label in self.accepts:
            check_sampling(f"rule {self.name} accepts", label)
        object.__setattr__(self, "__doc__", self.verify.__doc__)

    @property
    def name(self) -> str:
        """The name of its function."""
        return self.verify.__name__

    def __call__(
        self, keys: Key[Array, "B"], draft: Draft, log_p: Float[Array, "B N V"], **settings: Any
    ) -> Verdict:
        """The verdict.

        Args:
          keys: the round's keys.
          draft: a draft with N nodes per row.
          log_p: float32, warped target log-probabilities of the token after each node.
          settings: the rule's scalars and extras, by name.

        Raises:
          PairError: the rule is not made for drafts like this one. Without this error it would
            silently give a wrong distribution.
        """
        self.check_draft(draft.sampling, draft.shape, "this draft has")
        # Inside a caller's own program the rule is a part of it; alone it is one program.
        traced = _is_traced((keys, draft, log_p, settings))
        verify = self.verify if traced else _compiled(self.verify)
        return verify(keys, draft, log_p, **settings)

    def check_draft(self, sampling: str, shape: TreeShape, source: str) -> None:
        """Refuses drafts that the rule is not made for.

        Raises:
          PairError: says what the rule needs, and what it gets. ``source`` says from where, as
            "drafter tree proposes".
        """
        if sampling not in self.accepts:
            accepted = " or ".join(SAMPLINGS[label] for label in sorted(self.accepts))
            raise PairError(
                f"rule {self.name} accepts {accepted}, but {source} "
                f"{SAMPLINGS.get(sampling, sampling)}; choose another --rule or --drafter"
            )
        if self.chain_only and not shape.is_chain:
            raise PairError(
                f"rule {self.name} verifies a chain, but {source} a tree; choose a tree rule or a "
                "chain drafter"
            )

    def __repr__(self) -> str:
        return f"Rule({self.name})"


def _is_traced(tree: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


@functools.cache
def _compiled(verify: Callable[..., Verdict]) -> Callable[..., Verdict]:
    """What a rule called outside jit runs: one program per shape."""
    return jax.jit(verify)


def rule(
    *,
    accepts: Iterable[str],
    lossless: bool,
    chain_only: bool = True,
    settings: Iterable[str] = (),
    extras: Iterable[str] = (),
    splits_vocabulary: bool = False,
) -> Callable[[Callable[..., Verdict]], Rule]:
    """Decorator that makes an acceptance rule of a verify function; see :class:`Rule`."""

    def decorate(verify: Callable[..., Verdict]) -> Rule:
        # Rule's own checks make a frozenset and tuples of what is given.
        given: Any = {"accepts": accepts, "settings": settings, "extras": extras}
        flags = {"chain_only": chain_only, "splits_vocabulary": splits_vocabulary}
        return Rule(verify, lossless=lossless, **flags, **given)

    return decorate


def check_sampling(what: str, label: str) -> None:
    """Refuses a label that is not one of ``SAMPLINGS``.

    Raises:
      OptionError: names the label and the known ones.
    """
    if label not in SAMPLINGS:
        known = ", ".join(SAMPLINGS)
        raise OptionError(f"{what} {label!r}: expected one of {known}")


class Sequences(NamedTuple):
    """The sequences that a search found for each row, best first."""

    tokens: Int[Array, "B n S"]  # the prompt, then what was generated
    lengths: Int[Array, "B n"]  # tokens generated
    scores: Float[Array, "B n"]


class Method(Protocol):
    """A decoding method: state in, state out, one round at a time.

    The loop calls ``init``, then ``prefill_chunk`` for each chunk of the prompt, then ``ready``.
    After that, it calls ``step`` once per round. Every array of the state has rows first (or a
    fixed number of entries per row). So a row that is ready can take the batch slot of one that
    has ended.
    """

    round_positions: int  # positions above ``length`` that one round may write
    depth: int = 0  # most draft tokens that a round accepts
    extra_positions: int = 0  # cache positions that ``init`` may fill, beyond a row's own tokens
    # How many tokens after its own a cache entry depends on. So many tokens at the end of a cached
    # prefix are prefilled again, because other tokens follow them now.
    lookback: int = 0
    # Beam search: tokens are final only at the end, so all cache positions are needed at once.
    needs_full_length: bool = False
    host_driven: bool = False  # the host drives its rounds, because the reward needs text
    # Whether its target applies the settings that read a row's tokens, such as penalties.
    follows_paths: bool = False

    @property
    def name(self) -> str:
        """The method's name in messages."""
        return type(self).__name__

    def check_sampling(self, sampling: Sampling) -> None:
        """Raises OptionError if the method cannot draw with these settings."""
        if sampling.path_settings and not self.follows_paths:
            raise OptionError(
                f"{', '.join(sampling.path_settings)}: method {self.name} does not support it; "
                "leave it out, or choose a method with a drafter and a lossless rule"
            )

    def init(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        """The state with what the method keeps, its caches empty."""
        return state.replace(cache=inputs.target.cache(*state.tokens.shape))

    def prefill_chunk(
        self,
        inputs: Inputs,
        state: DecodeState,
        tokens: Int[Array, "B N"],
        start: Int[Array, "B"],
    ) -> DecodeState:
        """The state after N more tokens of each row's prompt, from position ``start`` on.

        All but the row's last token are prefilled, in chunks. The last is the first round's root.
        """
        cache, _ = inputs.target.prefill_chunk(state.cache, tokens, start)
        return state.replace(cache=cache)

    def ready(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        """The state as rounds read it, once the prompt is prefilled."""
        return state

    @abstractmethod
    def step(self, inputs: Inputs, state: DecodeState) -> DecodeState:
        """One round; every live row gains at least one token."""
        raise NotImplementedError

    def on_slot_reuse(self, before: DecodeState, state: DecodeState) -> DecodeState:
        """The state of rows that take the batch slots of those in ``before``."""
        return state

    def sequences(self, state: DecodeState) -> Sequences | None:
        """Of rows that have ended, all that the method found; None: only the state's tokens."""
        return None
