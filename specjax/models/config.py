"""What a decoder-only language model looks like, in one frozen dataclass.

This file knows nothing of arrays, nor of Hugging Face's names for all this: each family's
file translates its own ``config.json``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from specjax._util.errors import ModelError

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency and how it is stretched to longer contexts.

    ``kind`` is the checkpoint's ``rope_type``. ``dynamic`` is frozen at the configured
    length: frequencies that change with the running length would invalidate a KV cache.
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


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder-only model: sizes, and the switches its family may set.

    Sizes are in elements. The defaults are Llama's; ``family`` is Hugging Face's
    ``model_type`` and picks the module (:mod:`specjax.models.families`). ``adaptive_ids`` are
    those of a model that SDSAT tuned, by their place in a window of the trained length L: L
    times the same id, or L distinct ones.
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
    rope: RopeConfig | None = RopeConfig()  # None: positions are learned, or ALiBi
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
    qk_norm: bool = False
    sliding_layers: tuple[bool, ...] | None = None  # which layers slide; None: all of them
    norm: str = "rms"  # rms, rms+1 (the weight is the scale less one) or layer
    activation: str = "silu"  # silu, gelu, gelu_tanh or relu
    gated_mlp: bool = True
    rotary_dim: int | None = None  # the part of each head that turns; None: all of it
    local_rope: RopeConfig | None = None  # of sliding layers, where it differs
    alibi: bool = False
    parallel_residual: bool = False  # attention and MLP read the same input
    norm_before: bool = True  # False: the norms follow attention and MLP
    final_norm: bool = True
    embed_size: int | None = None  # width of the token embedding, where it is projected
    attention_scale: float | None = None  # on q·k; None: head_dim ** -0.5
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    shards: int = 1  # devices that share the model; heads and MLP columns are then one device's

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}"
            )
        turning = self.rotary_dim or self.head_dim
        if self.rope and turning % 2:
            name = "head_dim" if self.rotary_dim is None else "rotary_dim"
            raise ModelError(f"{name}={turning} must be even: rotary halves are paired")

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
        """A Llama from its sizes; ``num_kv_heads`` and ``head_dim`` default as usual."""
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
        """Each layer's sliding window; None: it sees everything before."""
        slides = self.sliding_layers or (True,) * self.num_layers
        return tuple(self.sliding_window if layer else None for layer in slides)


def period(kinds: Sequence[Any]) -> int:
    """After how many layers their kinds repeat."""
    return next(n for n in range(1, len(kinds) + 1) if kinds[n:] == kinds[:-n])


def as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Token ids as a tuple, from the one-or-many form that Hugging Face configs use."""
    return tuple(value if isinstance(value, list) else [] if value is None else [value])
