"""What a decoder-only language model looks like, in one frozen dataclass.

This file knows nothing of arrays: it turns a Hugging Face ``config.json`` into a
:class:`ModelConfig` and refuses, by name, what the modules cannot express.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from specjax.errors import ModelError

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
    """Architecture of a Llama-family model (Llama 1-3.x, CodeLlama, TinyLlama, Mistral).

    Sizes are in elements. ``attention_bias`` covers q, k, v and o; ``mlp_bias`` gate, up
    and down. ``sliding_window`` is the number of positions a token sees, itself included.
    ``adaptive_ids`` are those of a model that SDSAT tuned, by their place in a window of the
    trained length L: L times the same id, or L distinct ones.
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
    rope: RopeConfig = RopeConfig()
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    adaptive_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim={self.head_dim} must be even: rotary halves are paired")

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
    def num_params(self) -> int:
        """Number of parameters, a tied head counted once."""
        d, h, k, f = self.hidden_size, self.num_heads, self.num_kv_heads, self.intermediate_size
        heads = (h + 2 * k) * self.head_dim
        attention = heads * d + h * self.head_dim * d
        bias = self.attention_bias * (heads + d) + self.mlp_bias * (2 * f + d)
        block = attention + 3 * d * f + 2 * d + bias
        tables = (1 if self.tie_embeddings else 2) * self.vocab_size * d
        return self.num_layers * block + tables + d


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """The :class:`ModelConfig` of a Hugging Face ``config.json``.

    Raises:
      ModelError: the model type, activation, rope kind or another switch is not
        supported; the message names it.
    """
    family = config.get("model_type")
    if family not in ("llama", "mistral"):
        raise ModelError(f"model_type {family!r} is not supported; supported: llama, mistral")
    _refuse_unsupported(config)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    return ModelConfig(
        family=family,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_size(config, "num_key_value_heads", 8 if family == "mistral" else heads),
        head_dim=_size(config, "head_dim", hidden // heads),
        intermediate_size=_size(config, "intermediate_size"),
        max_position=_size(config, "max_position_embeddings", 2048),
        rope=_rope_from_hf(config),
        norm_eps=_positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        sliding_window=_window(config) if family == "mistral" else None,
        bos_id=config.get("bos_token_id"),
        eos_ids=as_ids(config.get("eos_token_id")),
        pad_id=config.get("pad_token_id"),
        adaptive_ids=as_ids(config.get("adaptive_ids")),
    )


def to_hf(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` that transformers reads back as the same model."""
    out = {
        "architectures": ["LlamaForCausalLM" if cfg.family == "llama" else "MistralForCausalLM"],
        "model_type": cfg.family,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.intermediate_size,
        "max_position_embeddings": cfg.max_position,
        "rms_norm_eps": cfg.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": cfg.tie_embeddings,
        "rope_theta": cfg.rope.theta,
        "rope_scaling": _rope_to_hf(cfg.rope),
        "bos_token_id": cfg.bos_id,
        "eos_token_id": list(cfg.eos_ids) if len(cfg.eos_ids) != 1 else cfg.eos_ids[0],
        "pad_token_id": cfg.pad_id,
        "torch_dtype": dtype,
    }
    if cfg.family == "mistral":
        out["sliding_window"] = cfg.sliding_window
    else:
        out |= {"attention_bias": cfg.attention_bias, "mlp_bias": cfg.mlp_bias}
    if cfg.adaptive_ids:
        out["adaptive_ids"] = list(cfg.adaptive_ids)
    return out


def as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Token ids as a tuple, from the one-or-many form that Hugging Face configs use."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise ModelError(f"expected token ids, got {value!r}")
    return tuple(ids)


def _size(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if name not in config:
        raise ModelError(f"config.json lacks {name!r}, which every Llama-family model has")
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} must be a positive integer, got {value!r}")
    return value


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {name} must be a positive number, got {value!r}")
    return float(value)


def _window(config: dict[str, Any]) -> int | None:
    """Mistral's sliding window: absent, it is 4096; null, there is none (as transformers)."""
    if "sliding_window" in config and config["sliding_window"] is None:
        return None
    return _size(config, "sliding_window", 4096)


def _refuse_unsupported(config: dict[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"hidden_act {activation!r} is not supported; supported: silu")
    if config.get("quantization_config") is not None:
        raise ModelError("quantization_config is not supported: load the unquantised checkpoint")
    if config.get("num_local_experts"):
        raise ModelError("num_local_experts is not supported: mixture-of-experts checkpoint")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("partial_rotary_factor is not supported for the Llama family")


_ROPE_FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}


def _rope_from_hf(config: dict[str, Any]) -> RopeConfig:
    """Reads both spellings: ``rope_theta`` + ``rope_scaling``, and ``rope_parameters``."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError(f"config.json: rope_scaling must be an object, got {scaling!r}")
    scaling = dict(scaling)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
    theta = _positive("rope_theta", theta)
    if kind not in ROPE_KINDS:
        raise ModelError(f"rope_type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    if scaling.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("partial_rotary_factor is not supported for the Llama family")
    unknown = sorted(set(scaling) - set(_ROPE_FIELDS))
    if unknown:
        raise ModelError(f"rope setting {unknown[0]!r} is not supported for rope_type {kind!r}")
    fields = {_ROPE_FIELDS[name]: value for name, value in scaling.items() if value is not None}
    for name, value in scaling.items():
        if value is not None and not isinstance(value, (int, float)):
            raise ModelError(f"config.json: {name} must be a number, got {value!r}")
    if kind in ("llama3", "yarn"):
        fields.setdefault("original_max_position", config.get("max_position_embeddings", 2048))
    if kind != "default" and "factor" not in fields:
        raise ModelError(f"rope_type {kind!r} lacks its 'factor'")
    return RopeConfig(theta=theta, kind=kind, **fields)


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    names = {
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position"),
        "yarn": (
            "factor",
            "original_max_position",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    }.get(rope.kind, ("factor",))
    hf_names = {ours: theirs for theirs, ours in _ROPE_FIELDS.items()}
    values = {hf_names[name]: getattr(rope, name) for name in names}
    return {"rope_type": rope.kind} | {k: v for k, v in values.items() if v is not None}
