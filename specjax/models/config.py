"""The architecture of a decoder-only language model, in one frozen dataclass.

This file knows neither arrays nor Hugging Face's names: each family's file translates its own
``config.json``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from specjax._util.errors import ModelError

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: its base frequency, and how it is stretched to longer contexts.

    ``kind`` is the checkpoint's ``rope_type``, one of :data:`ROPE_KINDS`. The other fields are
    transformers' rope settings; ``original_max_position`` is in tokens.

    For ``dynamic`` the frequencies stay those of the configured length. If they followed the
    running length, they would invalidate the KV cache.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()  # longrope: a factor of each frequency
    long_factor: tuple[float, ...] = ()
    max_position: int = 0  # longrope: the tokens that the model reads
    reversed: bool = False  # rotates the other way round


class QueryScale(NamedTuple):
    """Queries at position p are scaled by ``1 + beta · ln(1 + floor((p + offset) / length))``."""

    beta: float
    length: int
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a mixture, and how a token's router chooses among them.

    Attributes:
      count: experts of a layer.
      active: how many of them a token chooses.
      size: columns of an expert.
      scores: what the router's logits become: ``softmax`` over all experts, or ``sigmoid``.
      normalized: the chosen experts' scores are divided by their sum.
      scale: a factor on their results.
      corrected: the choice, not the factors, follows scores plus a correction of each expert.
      router_bias: the router's logits have a bias.
      groups, active_groups, group_best: a token chooses within its best groups of experts, each
        judged by the sum of its best scores, so many of them.
      shared_size: columns of the expert that all tokens share; 0: there is none.
      shared_gate: a gate of its own scales the shared expert.
      scales_inputs: scores are factors on the experts' inputs, not on their results.
      biases: the experts' layers have biases.
      balance: how much of the balancing loss training adds to the mean loss, in each layer with
        experts.
      clip: (alpha, limit) of gpt-oss's gate, ``gate · sigmoid(alpha · gate) · (up + 1)`` with both
        limited; None: the model's activation.

    Raises:
      ModelError: the numbers do not fit each other.
    """

    count: int
    active: int
    size: int
    scores: str = "softmax"
    normalized: bool = False
    scale: float = 1.0
    corrected: bool = False
    router_bias: bool = False
    groups: int = 1
    active_groups: int = 1
    group_best: int = 1
    shared_size: int = 0
    shared_gate: bool = False
    scales_inputs: bool = False
    biases: bool = False
    clip: tuple[float, float] | None = None
    balance: float = 0.0

    def __post_init__(self):
        if self.count % self.groups:
            raise ModelError(f"{self.groups} groups must divide {self.count} experts")
        available = self.count // self.groups * min(self.active_groups, self.groups)
        if self.active > available:
            raise ModelError(f"a token cannot choose {self.active} of {available} experts")


class LatentConfig(NamedTuple):
    """The sizes of latent attention (:mod:`specjax.models.latent`).

    ``rank`` is that of the latent, ``query_rank`` that of the queries, if they have one. A head has
    ``plain`` entries that are not rotated and ``rotated`` ones; its values have ``value`` entries.
    """

    query_rank: int | None
    rank: int
    plain: int
    rotated: int
    value: int

    @property
    def size(self) -> int:
        """Entries of a token in the cache: its latent, and the key that is rotated."""
        return self.rank + self.rotated


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder-only model: its sizes, and the switches its family may set.

    Sizes are in elements. The defaults are Llama's. ``family`` is Hugging Face's ``model_type`` and
    picks the module (:mod:`specjax.models.families`). ``adaptive_ids`` are the adaptive tokens of a
    model that SDSAT tuned, one per index in a window of the trained length L: L times the same id,
    or L distinct ids.

    Raises:
      ModelError: the key heads do not divide the heads, or an odd number of entries is rotated.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    rope: RopeConfig | None = RopeConfig()  # None: learned positions, or ALiBi
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    attention_bias: bool = False  # of q, k, v and the output
    mlp_bias: bool = False
    sliding_window: int | None = None  # positions a token sees, itself included
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    adaptive_ids: tuple[int, ...] = ()
    qkv_bias: bool = False  # of q, k and v alone
    qk_norm: str | None = None  # of each head (head), with weights of its own (heads), or of all
    qk_norm_kind: str | None = None  # None: as ``norm``
    qk_norm_after_rope: bool = False  # then layers without a rope have none
    sliding_layers: tuple[bool, ...] | None = None  # which layers have the window; None: all
    chunked: bool = False  # windows are chunks: a token sees those of its chunk before it
    norm: str = "rms"  # one of specjax.models.layers.NORMS
    activation: str = "silu"  # one of specjax.models.layers.ACTIVATIONS
    gated_mlp: bool = True
    rotary_dim: int | None = None  # entries of each head that are rotated; None: all
    rope_interleaved: bool = False  # adjacent entries are pairs; otherwise the two halves
    rope_layers: tuple[bool, ...] | None = None  # which layers are rotated; None: all
    local_rope: RopeConfig | None = None  # of sliding layers, if it differs
    alibi: bool = False
    parallel_residual: bool = False  # attention and MLP read the same input
    shared_norm: bool = False  # … and the same norm of it
    norm_before: bool = True  # norms of the inputs of attention and MLP
    norm_after: bool = False  # norms of their outputs; without either the sums are normed
    final_norm: bool = True
    embed_norm: bool = False
    embed_scale: float | None = None
    residual_scale: float = 1.0  # on what attention and MLP add
    logit_scale: float = 1.0
    head_bias: bool = False
    embed_size: int | None = None  # of the token embedding, if it is projected to hidden_size
    attention_scale: float | None = None  # on q·k; None: head_dim ** -0.5
    attention_softcap: float | None = None
    attention_clip: float | None = None  # limits q, k and v to ± this
    sinks: bool = False  # each head's softmax has one more score, which has no value
    query_scale: QueryScale | None = None  # of layers without a rope; of all, if each has one
    logit_softcap: float | None = None
    latent: LatentConfig | None = None  # attention to latents; head_dim is a query's
    experts: ExpertsConfig | None = None  # in the place of an MLP
    expert_layers: tuple[bool, ...] | None = None  # which layers have them; None: all
    skipped_tensors: tuple[str, ...] = ()  # prefixes of a checkpoint's other parts
    # Devices that the model is split over. Heads and MLP columns then count one device's share.
    shards: int = 1

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}"
            )
        rotated = self.rotary_dim or self.head_dim
        if self.rope and rotated % 2:
            name = "head_dim" if self.rotary_dim is None else "rotary_dim"
            raise ModelError(f"{name}={rotated} must be even: rotary halves are paired")
        if self.rope and self.rope.kind == "longrope":
            self._check_factors(self.rope, rotated // 2)

    @staticmethod
    def _check_factors(rope: RopeConfig, frequencies: int) -> None:
        """Refuses lists of factors that do not have one for each frequency."""
        for name in ("short_factor", "long_factor"):
            count = len(getattr(rope, name))
            if count != frequencies:
                raise ModelError(
                    f"{name} of the rope has {count} entries, expected {frequencies}: one for "
                    "each pair of rotated entries of a head"
                )

    @classmethod
    def llama(
        cls,
        *,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int,
        max_position: int = 2048,
        rope_theta: float = 10000.0,
        tie_embeddings: bool = True,
        **other: Any,
    ) -> ModelConfig:
        """A Llama of these sizes.

        ``num_kv_heads`` defaults to ``num_heads``, ``head_dim`` to ``hidden_size / num_heads``.
        ``other`` are further fields of the config.

        Raises:
          ModelError: the heads do not divide the hidden size, or the key heads the heads.
        """
        if head_dim is None and hidden_size % num_heads:
            raise ModelError(f"num_heads={num_heads} must divide hidden_size={hidden_size}")
        return cls(
            family="llama",
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads or num_heads,
            head_dim=head_dim or hidden_size // num_heads,
            intermediate_size=intermediate_size,
            max_position=max_position,
            rope=other.pop("rope", None) or RopeConfig(theta=rope_theta),
            tie_embeddings=tie_embeddings,
            **other,
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's sliding window; None: a token sees everything before it."""
        if not self.sliding_layers:
            return (self.sliding_window,) * self.num_layers
        return tuple(self.sliding_window if slides else None for slides in self.sliding_layers)

    @property
    def rotations(self) -> tuple[bool, ...]:
        """Whether each layer has rotary positions."""
        return self.rope_layers or (self.rope is not None,) * self.num_layers

    @property
    def cached_heads(self) -> int:
        """Heads of a cache's keys."""
        return 1 if self.latent else self.num_kv_heads

    @property
    def cached_size(self) -> int:
        """Entries of a head of a cache's keys."""
        return self.latent.size if self.latent else self.head_dim

    def first_layers(self, count: int) -> ModelConfig:
        """The config of a model of the first ``count`` layers."""

        def cut(kinds: tuple[bool, ...] | None) -> tuple[bool, ...] | None:
            return kinds and kinds[:count]

        return dataclasses.replace(
            self,
            num_layers=count,
            sliding_layers=cut(self.sliding_layers),
            rope_layers=cut(self.rope_layers),
            expert_layers=cut(self.expert_layers),
        )

    def layer(self, index: int) -> ModelConfig:
        """The config by which one layer is made, equal for layers of the same parameters.

        It keeps the number of all layers, which scales the initial weights.
        """
        has_experts = self.expert_layers is None or self.expert_layers[index]
        return dataclasses.replace(
            self,
            sliding_layers=None,
            rope_layers=None,
            experts=self.experts if has_experts else None,
            expert_layers=None,
        )


def period(kinds: Sequence[Any]) -> int:
    """The number of layers after which the kinds repeat; all of them if they never do.

    The last repetition may be incomplete.
    """
    for n in range(1, len(kinds)):
        if kinds[n:] == kinds[:-n]:
            return n
    return len(kinds)


def as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Token ids as a tuple; Hugging Face's configs hold one id, a list of ids, or none."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
