"""What the families' ``config.json`` files have in common, read strictly.

A value of the wrong kind or out of range (:data:`KEYS`, :data:`ROPE`, :func:`check`) and a feature
that the modules cannot express are errors by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax._util.checks import (
    FLAG,
    FROM_0,
    OBJECT,
    POSITIVE,
    TEXT,
    Check,
    either,
    list_of,
    number,
    one_of,
    quoted,
    require,
    require_all,
    whole,
)
from specjax._util.errors import ModelError
from specjax.models.config import ROPE_KINDS, ModelConfig, RopeConfig, as_ids

Config = Mapping[str, Any]

MOST_LAYERS = 4096
_LAYER_KINDS = one_of("full_attention", "sliding_attention")


def _each(check: Check, names: str) -> dict[str, Check]:
    return dict.fromkeys(names.split(), check)


# What a value must be that any family reads, under the family's own name of it.
KEYS = {
    **_each(whole(), "vocab_size hidden_size n_embd n_embed intermediate_size n_inner ffn_dim"),
    **_each(whole(), "num_attention_heads n_head num_key_value_heads head_dim"),
    **_each(whole(), "max_position_embeddings n_positions seq_length word_embed_proj_dim"),
    **_each(whole(), "sliding_window sliding_window_pattern query_pre_attn_scalar"),
    **_each(whole(1, MOST_LAYERS), "num_hidden_layers n_layer"),
    **_each(POSITIVE, "rms_norm_eps layer_norm_eps layer_norm_epsilon"),
    **_each(POSITIVE, "rope_theta rotary_emb_base rope_local_base_freq"),
    **_each(POSITIVE, "attn_logit_softcapping final_logit_softcapping"),
    **_each(FLAG, "tie_word_embeddings attention_bias mlp_bias use_sliding_window enable_bias"),
    **_each(FLAG, "do_layer_norm_before _remove_final_layer_norm use_parallel_residual"),
    **_each(TEXT, "hidden_act hidden_activation activation_function"),
    **_each(OBJECT, "rope_scaling rope_parameters"),
    "rotary_pct": number(0, 1, above=True),
    "max_window_layers": whole(0),
    "layer_types": list_of(_LAYER_KINDS),
}
ROPE = {  # of rope_scaling and rope_parameters
    **_each(TEXT, "rope_type type"),
    **_each(POSITIVE, "rope_theta factor low_freq_factor high_freq_factor"),
    **_each(POSITIVE, "beta_fast beta_slow attention_factor"),
    **_each(FROM_0, "mscale mscale_all_dim"),
    "original_max_position_embeddings": whole(),
    "truncate": FLAG,
    "partial_rotary_factor": number(0, 1, above=True),
}


def check(config: Config) -> None:
    """Refuses a value of a wrong type, out of its range, or unlike another one's.

    Null counts as absent, as in transformers.

    Raises:
      ModelError: names the key, the value, and what was expected.
    """
    check_values(config)
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name) or {}
        # One rope, or in Gemma 3 one for each kind of layer.
        for rope in (given, *(part for part in given.values() if type(part) is dict)):
            require_all(f"config.json: {name}.", rope, ROPE, ModelError)
    layers, kinds = config.get("num_hidden_layers"), config.get("layer_types")
    if layers and kinds is not None and len(kinds) != layers:
        raise ModelError(f"config.json: layer_types has {len(kinds)} entries for {layers} layers")
    if config.get("vocab_size"):
        ids = token_ids(config["vocab_size"])
        known = dict.fromkeys(("eos_token_id", "adaptive_ids"), ids)
        one = whole(0, config["vocab_size"] - 1)
        known |= dict.fromkeys(("bos_token_id", "pad_token_id"), one)
        require_all("config.json: ", config, known, ModelError)


def check_values(config: Config) -> None:
    """Refuses a value of :data:`KEYS` that is of a wrong type or out of its range."""
    require_all("config.json: ", config, KEYS, ModelError)


def token_ids(vocab_size: int) -> Check:
    """An id within the vocabulary, or several."""
    one = whole(0, vocab_size - 1)
    return either(one._replace(says=f"an id from 0 to {vocab_size - 1}"), list_of(one))


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_REFUSED = {
    "num_local_experts": "mixture-of-experts checkpoint",
    "add_cross_attention": "the model is no decoder-only model",
}


QUANT_METHOD = "specjax"
QUANTIZATION = {"version": Check("1", lambda x: x == 1), "scheme": TEXT}


def quantization(config: Config) -> str | None:
    """The scheme of a checkpoint's quantized weights; None where they are not.

    Raises:
      ModelError: somebody else's scheme, by name.
    """
    found = config.get("quantization_config")
    if found is None:
        return None
    method = found.get("quant_method") if type(found) is dict else found
    if method != QUANT_METHOD:
        raise ModelError(
            f"quantization_config: quant_method {quoted(method)} is not supported; load the "
            "checkpoint before it was quantized, --quantize quantizes it"
        )
    known = {name: found.get(name) for name in QUANTIZATION}
    for name, value in known.items():
        require("config.json: quantization_config.", name, value, QUANTIZATION[name], ModelError)
    return known["scheme"]


def common(config: Config, tied: bool = False) -> dict[str, Any]:
    """The fields of :class:`ModelConfig` that every family stores alike.

    ``tied``: whether the head is the embedding where the config does not say.
    """
    quantization(config)
    for name, why in _REFUSED.items():
        if config.get(name) not in (None, False, 0):
            raise ModelError(f"{name} is not supported: {why}")
    return {
        "family": config["model_type"],
        "vocab_size": size(config, "vocab_size"),
        "hidden_size": size(config, "hidden_size"),
        "num_layers": size(config, "num_hidden_layers"),
        "num_heads": size(config, "num_attention_heads"),
        "tie_embeddings": flag(config, "tie_word_embeddings", tied),
        "bos_id": config.get("bos_token_id"),
        "eos_ids": as_ids(config.get("eos_token_id")),
        "pad_id": config.get("pad_token_id"),
        "adaptive_ids": as_ids(config.get("adaptive_ids")),
    }


def gpt_like(config: Config, tied: bool = False) -> dict[str, Any]:
    """:func:`common`, and what the families after GPT-2 share: keys for each head, layer norms."""
    fields = common(config, tied)
    fields |= {"num_kv_heads": fields["num_heads"], "head_dim": head_dim(config)}
    return fields | {"norm": "layer", "gated_mlp": False}


def common_to_hf(cfg: ModelConfig, architecture: str, dtype: str) -> dict[str, Any]:
    """The inverse of :func:`common`."""
    adaptive = {"adaptive_ids": list(cfg.adaptive_ids)} if cfg.adaptive_ids else {}
    return adaptive | {
        "architectures": [architecture],
        "model_type": cfg.family,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "tie_word_embeddings": cfg.tie_embeddings,
        "bos_token_id": cfg.bos_id,
        "eos_token_id": list(cfg.eos_ids) if len(cfg.eos_ids) != 1 else cfg.eos_ids[0],
        "pad_token_id": cfg.pad_id,
        "torch_dtype": dtype,
    }


def renamed(config: Config, aliases: Mapping[str, str]) -> dict[str, Any]:
    """``config`` with a family's own names of common fields replaced by the common ones."""
    return {aliases.get(name, name): value for name, value in config.items()}


def flag(config: Config, name: str, default: bool) -> bool:
    """A switch; null counts as absent."""
    value = config.get(name)
    return default if value is None else value


def refuse(config: Config, unsupported: Mapping[str, Any]) -> None:
    """Refuses each name whose value differs from the only supported one, given here.

    Null counts as absent.
    """
    for name, only in unsupported.items():
        if config.get(name) not in (None, only):
            raise ModelError(f"config.json: {name}={config[name]!r} is not supported")


def size(config: Config, name: str, default: int | None = None) -> int:
    """A positive integer; without a default it must be there."""
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json lacks {name!r}, which every {config['model_type']} has")
    return value


def head_dim(config: Config) -> int:
    """The width of a head: given, or the hidden size's share."""
    if config.get("head_dim") is not None:
        return size(config, "head_dim")
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    if hidden % heads:
        raise ModelError(f"num_attention_heads={heads} must divide hidden_size={hidden}")
    return hidden // heads


def positive(config: Config, name: str, default: float | None = None) -> float | None:
    """A positive finite number, or the default where it is null or absent."""
    value = config.get(name)
    return default if value is None else float(value)


def activation(config: Config, name: str, default: str, supported: tuple[str, ...]) -> str:
    """The activation's name here; ``supported`` are the ones the family's modules know."""
    theirs = config.get(name) or default
    ours = _ACTIVATIONS.get(theirs)
    if ours not in supported:
        raise ModelError(f"{name} {theirs!r} is not supported; supported: {', '.join(supported)}")
    return ours


def activation_to_hf(ours: str) -> str:
    """Hugging Face's name of an activation."""
    return "gelu_pytorch_tanh" if ours == "gelu_tanh" else ours


def sliding_layers(config: Config, default: tuple[bool, ...]) -> tuple[bool, ...] | None:
    """Which layers slide, by ``layer_types``; None where all do."""
    types = config.get("layer_types")
    slides = default if types is None else tuple(t == "sliding_attention" for t in types)
    return None if all(slides) else slides


def layer_types(cfg: ModelConfig) -> list[str]:
    """``layer_types`` of a model with sliding layers."""
    return ["full_attention" if w is None else "sliding_attention" for w in cfg.windows]


_RENAMED = {"original_max_position": "original_max_position_embeddings"}
_ROPE_FIELDS = {  # Hugging Face's name → RopeConfig's
    _RENAMED.get(field.name, field.name): field.name
    for field in dataclasses.fields(RopeConfig)
    if field.name not in ("theta", "kind")
}


def rope_from_hf(config: Config, theta: float = 10000.0) -> RopeConfig:
    """Reads both spellings: ``rope_theta`` + ``rope_scaling``, and ``rope_parameters``.

    ``theta`` is the base where the config does not give it.
    """
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    theta = scaling.pop("rope_theta", None) or positive(config, "rope_theta", theta)
    if kind not in ROPE_KINDS:
        raise ModelError(f"rope_type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    if (scaling.pop("partial_rotary_factor", None) or 1.0) != 1.0:
        raise ModelError(f"partial_rotary_factor is not supported for {config['model_type']}")
    unknown = sorted(set(scaling) - set(_ROPE_FIELDS))
    if unknown:
        raise ModelError(f"rope setting {unknown[0]!r} is not supported for rope_type {kind!r}")
    fields = {_ROPE_FIELDS[name]: value for name, value in scaling.items() if value is not None}
    if kind in ("llama3", "yarn"):
        fields.setdefault("original_max_position", config.get("max_position_embeddings") or 2048)
    if kind != "default" and "factor" not in fields:
        raise ModelError(f"rope_type {kind!r} lacks its 'factor'")
    return _related(RopeConfig(theta=float(theta), kind=kind, **fields))


def _related(rope: RopeConfig) -> RopeConfig:
    """The rope, where no step from one frequency to another divides by zero."""
    holder = "config.json: rope_scaling."
    if rope.kind == "llama3":
        above = number(rope.low_freq_factor, above=True)
        require(holder, "high_freq_factor", rope.high_freq_factor, above, ModelError)
    if rope.kind == "yarn":
        require("config.json: ", "rope_theta", rope.theta, number(1, above=True), ModelError)
        expected = number(0, rope.beta_fast, above=True, below=True)
        require(holder, "beta_slow", rope.beta_slow, expected, ModelError)
    return rope


def rope_to_hf(rope: RopeConfig) -> dict[str, Any] | None:
    """``rope_scaling`` of a config.json; the base stands beside it."""
    if rope.kind == "default":
        return None
    ramp = [name for name in _ROPE_FIELDS if name.endswith("_freq_factor")]
    names = {
        "llama3": ["factor", *ramp, "original_max_position_embeddings"],
        "yarn": [name for name in _ROPE_FIELDS if name not in ramp],
    }.get(rope.kind, ["factor"])
    values = {name: getattr(rope, _ROPE_FIELDS[name]) for name in names}
    return {"rope_type": rope.kind} | {k: v for k, v in values.items() if v is not None}
