"""Reads what the families' ``config.json`` files have in common, strictly.

A value of a wrong type or out of range is an error that names it (:data:`KEYS`, :data:`ROPE`,
:func:`check`). So is a feature that our modules cannot express.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, overload

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
    require,
    require_all,
    satisfying,
    whole,
)
from specjax._util.errors import ModelError
from specjax.models.config import ROPE_KINDS, ModelConfig, RopeConfig, as_ids
from specjax.models.hf import quantizers
from specjax.models.hf.quantizers.settings import Quantizer

Config = dict[str, Any]

MAX_LAYERS = 4096
MAX_POSITION = 2048  # of most families in transformers, where a config names none
_LAYER_KINDS = one_of("full_attention", "sliding_attention", "chunked_attention")


def _is_letters(value: Any) -> bool:
    """Whether it is EXAONE's pattern of layers: L for local, G for global."""
    return type(value) is str and bool(value) and not set(value) - set("LG")


def _each(check: Check, names: str) -> dict[str, Check]:
    return dict.fromkeys(names.split(), check)


# The type and range of every value that some family reads, under that family's name for it.
KEYS = {
    **_each(whole(), "vocab_size hidden_size n_embd n_embed intermediate_size n_inner ffn_dim"),
    **_each(whole(), "num_attention_heads n_head num_key_value_heads head_dim"),
    **_each(whole(), "max_position_embeddings n_positions seq_length word_embed_proj_dim"),
    **_each(whole(), "sliding_window query_pre_attn_scalar rotary_dim no_rope_layer_interval"),
    **_each(whole(), "num_local_experts num_experts num_experts_per_tok moe_intermediate_size"),
    **_each(
        whole(), "shared_expert_intermediate_size decoder_sparse_step n_routed_experts n_group"
    ),
    **_each(whole(), "topk_group moe_num_experts moe_k moe_layer_interval"),
    **_each(whole(0), "n_shared_experts first_k_dense_replace moe_num_shared_experts"),
    **_each(whole(0), "num_nextn_predict_layers num_mtp_layers moe_layer_start_index"),
    **_each(whole(), "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"),
    **_each(whole(), "intermediate_size_mlp attention_chunk_size interleave_moe_layer_step"),
    "floor_scale": whole(),
    "attn_scale": POSITIVE,
    "moe_layers": list_of(whole(0)),
    "attn_temperature_tuning": FLAG,
    "topk_method": TEXT,
    "rope_interleave": FLAG,
    "moe_layer_end_index": whole(-1),
    "mlp_only_layers": list_of(whole(0)),
    **_each(POSITIVE, "routed_scaling_factor swiglu_alpha swiglu_limit"),
    **_each(FLAG, "norm_topk_prob qkv_bias"),
    **_each(whole(), "num_kv_heads ffn_hidden_size num_ln_in_parallel_attn"),
    "sliding_window_pattern": either(whole(), satisfying("a period or letters", _is_letters)),
    **_each(whole(1, MAX_LAYERS), "num_hidden_layers n_layer"),
    **_each(POSITIVE, "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps"),
    **_each(POSITIVE, "embedding_multiplier attention_multiplier residual_multiplier"),
    **_each(POSITIVE, "logits_scaling logit_scale clip_qkv"),
    **_each(POSITIVE, "rope_theta rotary_emb_base rope_local_base_freq"),
    **_each(POSITIVE, "attn_logit_softcapping final_logit_softcapping"),
    **_each(FLAG, "tie_word_embeddings attention_bias mlp_bias use_sliding_window enable_bias"),
    **_each(FLAG, "do_layer_norm_before _remove_final_layer_norm use_parallel_residual"),
    **_each(FLAG, "use_bias bias use_qkv_bias attention_out_bias qk_layernorm use_qk_norm alibi"),
    **_each(FLAG, "new_decoder_architecture multi_query parallel_attn"),
    **_each(TEXT, "hidden_act hidden_activation activation_function activation"),
    **_each(OBJECT, "rope_scaling rope_parameters"),
    **_each(number(0, 1, above=True), "rotary_pct partial_rotary_factor"),
    "no_rope_layers": list_of(whole(0, 1)),
    "original_max_position_embeddings": whole(),
    "max_window_layers": whole(0),
    "layer_types": list_of(_LAYER_KINDS),
}
ROPE = {  # of rope_scaling and rope_parameters
    **_each(TEXT, "rope_type type"),
    **_each(POSITIVE, "rope_theta factor low_freq_factor high_freq_factor"),
    **_each(POSITIVE, "beta_fast beta_slow attention_factor"),
    **_each(FROM_0, "mscale mscale_all_dim"),
    "original_max_position_embeddings": whole(),
    **_each(list_of(POSITIVE), "short_factor long_factor"),
    **_each(POSITIVE, "alpha"),
    "llama_4_scaling_beta": FROM_0,
    "max_position_embeddings": whole(),
    "truncate": FLAG,
    "finetuned": FLAG,  # a note in checkpoints of YaRN's authors
    "partial_rotary_factor": number(0, 1, above=True),
}


def without_unused_window(config: Config) -> Config:
    """``config`` without a window of 0, which transformers writes for a Qwen that has none."""
    if config.get("sliding_window") == 0 and config.get("use_sliding_window") is False:
        return {key: value for key, value in config.items() if key != "sliding_window"}
    return config


def check(config: Config) -> None:
    """Checks types and ranges, and that values agree with each other.

    Null counts as absent, as in transformers.

    Raises:
      ModelError: names the key, the value, and what was expected.
    """
    check_values(config)
    for name in ("rope_scaling", "rope_parameters"):
        settings = config.get(name) or {}
        # The settings of one rope; in Gemma 3 of one for each type of layer.
        per_layer_type = [value for value in settings.values() if type(value) is dict]
        for rope in (settings, *per_layer_type):
            require_all(f"config.json: {name}.", rope, ROPE, ModelError)

    layers = config.get("num_hidden_layers")
    types = config.get("layer_types")
    if layers and types is not None and len(types) != layers:
        raise ModelError(f"config.json: layer_types has {len(types)} entries for {layers} layers")

    if config.get("vocab_size"):
        one_id = whole(0, config["vocab_size"] - 1)
        ids = token_ids(config["vocab_size"])
        id_checks = {
            "eos_token_id": ids,
            "adaptive_ids": ids,
            "bos_token_id": one_id,
            "pad_token_id": one_id,
        }
        require_all("config.json: ", config, id_checks, ModelError)


def check_values(config: Config) -> None:
    """Checks each value of :data:`KEYS` for its type and range.

    Raises:
      ModelError: names the key, the value, and what was expected.
    """
    require_all("config.json: ", config, KEYS, ModelError)


def token_ids(vocab_size: int) -> Check:
    """The check for one id within the vocabulary, or a list of them."""
    one_id = whole(0, vocab_size - 1)
    alone = dataclasses.replace(one_id, expected=f"an id from 0 to {vocab_size - 1}")
    return either(alone, list_of(one_id))


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_REFUSED = {
    "num_local_experts": "mixture-of-experts checkpoint",
    "add_cross_attention": "the model is no decoder-only model",
    "is_encoder_decoder": "an encoder-decoder is no decoder-only model",
}

QUANT_METHOD = "specjax"
QUANTIZATION = {"version": satisfying("1", lambda x: x == 1), "scheme": TEXT}


def quantization(config: Config) -> str | Quantizer | None:
    """How a checkpoint's weights are quantized: our scheme, or another library's way.

    None: they are not quantized.

    Raises:
      ModelError: another library quantized them in a way that is not read.
    """
    settings = config.get("quantization_config")
    if settings is None:
        return None
    method = settings.get("quant_method") if type(settings) is dict else settings
    if method != QUANT_METHOD:
        return quantizers.parse(settings)
    for name, value_check in QUANTIZATION.items():
        value = settings.get(name)
        require("config.json: quantization_config.", name, value, value_check, ModelError)
    return settings["scheme"]


def common(config: Config, tied: bool = False) -> dict[str, Any]:
    """The fields of :class:`ModelConfig` that every family stores under the same names.

    ``tied``: the default of ``tie_word_embeddings``.

    Raises:
      ModelError: a feature that is not supported, such as experts.
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
    """:func:`common`, and what GPT-2's descendants share: multi-head attention, layer norms."""
    fields = common(config, tied)
    return fields | {
        "num_kv_heads": fields["num_heads"],
        "head_dim": head_dim(config),
        "norm": "layer",
        "gated_mlp": False,
    }


def common_to_hf(cfg: ModelConfig, architecture: str, dtype: str) -> dict[str, Any]:
    """The inverse of :func:`common`."""
    eos_ids = list(cfg.eos_ids)
    adaptive = {}
    if cfg.adaptive_ids:
        adaptive["adaptive_ids"] = list(cfg.adaptive_ids)
    return adaptive | {
        "architectures": [architecture],
        "model_type": cfg.family,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "tie_word_embeddings": cfg.tie_embeddings,
        "bos_token_id": cfg.bos_id,
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids,
        "pad_token_id": cfg.pad_id,
        "torch_dtype": dtype,
    }


def renamed(config: Config, aliases: Mapping[str, str]) -> dict[str, Any]:
    """``config`` with keys renamed by ``aliases``; other keys stay.

    ``aliases`` maps old names to new ones. A family's names as its keys give the common names.
    """
    return {aliases.get(name, name): value for name, value in config.items()}


def flag(config: Config, name: str, default: bool) -> bool:
    """A switch, or the default where it is null or absent."""
    value = config.get(name)
    return default if value is None else value


def refuse(config: Config, only: Mapping[str, Any]) -> None:
    """Refuses features by the only value of each that is supported; null counts as absent.

    Raises:
      ModelError: a value differs from the supported one.
    """
    for name, supported in only.items():
        if config.get(name) not in (None, supported):
            raise unsupported(name, config[name])


def unsupported(name: str, value: Any) -> ModelError:
    """The error for a value that no module of ours supports."""
    return ModelError(f"config.json: {name}={value!r} is not supported")


def size(config: Config, name: str, default: int | None = None) -> int:
    """A positive integer, or the default where it is null or absent.

    Raises:
      ModelError: it is absent and has no default.
    """
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json lacks {name!r}, which every {config['model_type']} has")
    return value


def head_dim(config: Config) -> int:
    """The size of an attention head: given, or the hidden size divided by the heads.

    Raises:
      ModelError: it is not given, and the heads do not divide the hidden size.
    """
    if config.get("head_dim") is not None:
        return size(config, "head_dim")
    hidden = size(config, "hidden_size")
    heads = size(config, "num_attention_heads")
    if hidden % heads:
        raise ModelError(f"num_attention_heads={heads} must divide hidden_size={hidden}")
    return hidden // heads


@overload
def positive(config: Config, name: str, default: float) -> float: ...


@overload
def positive(config: Config, name: str, default: None = None) -> float | None: ...


def positive(config: Config, name: str, default: float | None = None) -> float | None:
    """A positive finite number, or the default where it is null or absent."""
    value = config.get(name)
    return default if value is None else float(value)


def activation(config: Config, name: str, default: str, supported: tuple[str, ...]) -> str:
    """Our name of the activation; ``default`` is a name of Hugging Face's.

    Raises:
      ModelError: it is not among ``supported``, which are names of ours.
    """
    hf_name = config.get(name) or default
    our_name = _ACTIVATIONS.get(hf_name)
    if our_name is None or our_name not in supported:
        raise ModelError(f"{name} {hf_name!r} is not supported; supported: {', '.join(supported)}")
    return our_name


def activation_to_hf(our_name: str) -> str:
    """Hugging Face's name of an activation."""
    return "gelu_pytorch_tanh" if our_name == "gelu_tanh" else our_name


def sliding_layers(config: Config, default: tuple[bool, ...]) -> tuple[bool, ...] | None:
    """Whether each layer has a sliding window, by ``layer_types``; None if all have one.

    ``default`` holds if the config has no ``layer_types``.
    """
    types = config.get("layer_types")
    if types is None:
        slides = default
    else:
        slides = tuple(kind != "full_attention" for kind in types)
    return None if all(slides) else slides


def layer_types(cfg: ModelConfig) -> list[str]:
    """The inverse of :func:`sliding_layers`: ``layer_types`` of a model with sliding layers."""
    return ["full_attention" if size is None else "sliding_attention" for size in cfg.windows]


def _rope_fields() -> dict[str, str]:
    """The field of :class:`RopeConfig` for each rope setting of Hugging Face's."""
    renamed_fields = {"original_max_position": "original_max_position_embeddings"}
    names = [field.name for field in dataclasses.fields(RopeConfig)]
    not_settings = ("theta", "kind", "max_position", "reversed")
    settings = [name for name in names if name not in not_settings]
    return {renamed_fields.get(name, name): name for name in settings}


_ROPE_FIELDS = _rope_fields()


def rope_from_hf(
    config: Config, theta: float = 10000.0, max_position: int = MAX_POSITION
) -> RopeConfig:
    """The rope of a config, in either spelling of Hugging Face's.

    The old one is ``rope_theta`` with ``rope_scaling``, the new one ``rope_parameters``. ``theta``
    is the base frequency where the config gives none, ``max_position`` its
    ``max_position_embeddings``.

    Raises:
      ModelError: the rope type or one of its settings is not supported, or a setting is missing.
    """
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)  # some configs have both names
    scaling.pop("finetuned", None)
    theta = scaling.pop("rope_theta", None) or positive(config, "rope_theta", theta)
    if kind not in ROPE_KINDS:
        raise ModelError(f"rope_type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    if (scaling.pop("partial_rotary_factor", None) or 1.0) != 1.0:
        raise ModelError(f"partial_rotary_factor is not supported for {config['model_type']}")
    unknown = sorted(set(scaling) - set(_ROPE_FIELDS))
    if unknown:
        raise ModelError(f"rope setting {unknown[0]!r} is not supported for rope_type {kind!r}")

    fields = {_ROPE_FIELDS[name]: value for name, value in scaling.items() if value is not None}
    if kind == "longrope":
        fields = _longrope_fields(config, fields, max_position)
    if kind in ("llama3", "yarn"):
        fields = _with_trained_length(config, kind, fields, max_position)
    if kind != "default" and "factor" not in fields:
        raise ModelError(f"rope_type {kind!r} lacks its 'factor'")
    rope = RopeConfig(theta=float(theta), kind=kind, **fields)
    _check_rope(rope)
    return rope


def split_ropes(config: Config, local_theta: float) -> tuple[Config, RopeConfig]:
    """The config with the rope of layers with full attention alone, and that of sliding layers.

    New configs have ``rope_parameters`` for each type of layer. Old ones describe the first rope
    under ``rope_theta`` and ``rope_scaling``; the second one is then a default one, with the base
    ``local_theta``.

    Raises:
      ModelError: a setting is wrong, or the rope of the sliding layers is scaled.
    """
    by_layer_type = config.get("rope_parameters")
    if not by_layer_type:
        return config, RopeConfig(theta=local_theta)

    known = {"full_attention": OBJECT, "sliding_attention": OBJECT}
    require_all("config.json: rope_parameters.", by_layer_type, known, ModelError)
    unknown = sorted(set(by_layer_type) - set(known))
    if unknown:
        raise ModelError(f"config.json: rope_parameters must be per layer type, got {unknown[0]!r}")

    def only(layer_type: str) -> Config:
        return config | {"rope_parameters": by_layer_type.get(layer_type), "rope_scaling": None}

    local = rope_from_hf(only("sliding_attention"), local_theta)
    if local.kind != "default":
        raise ModelError(f"rope_type {local.kind!r} is not supported for sliding layers")
    return only("full_attention"), local


def ropes_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`split_ropes`: ``rope_parameters`` for each type of layer."""
    by_layer_type = {"full_attention": cfg.rope, "sliding_attention": cfg.local_rope}
    parameters = {}
    for layer_type, rope in by_layer_type.items():
        assert rope is not None, "such a model has both ropes"
        scaling = rope_to_hf(rope) or {"rope_type": "default"}
        parameters[layer_type] = scaling | {"rope_theta": rope.theta}
    return {"rope_parameters": parameters, "rope_scaling": None}


def partial_rope(
    config: Config,
    head_size: int,
    fraction: float = 1.0,
    name: str = "partial_rotary_factor",
    theta: float = 10000.0,
    max_position: int = MAX_POSITION,
) -> tuple[RopeConfig, int]:
    """The rope, and how many entries of each head it rotates.

    Old configs have the fraction under ``name``, new ones as ``partial_rotary_factor`` among the
    rope's settings; ``fraction`` holds where neither gives it.

    Raises:
      ModelError: as :func:`rope_from_hf`, or nothing is rotated.
    """
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    inside = scaling.pop("partial_rotary_factor", None)
    fraction = inside or positive(config, name, fraction)
    config = config | {"rope_parameters": scaling, "rope_scaling": None}
    rotary_dim = int(head_size * fraction)
    if not rotary_dim:
        raise ModelError(f"{name}={fraction} of head_dim={head_size} rotates no dimension")
    return rope_from_hf(config, theta, max_position), rotary_dim


def _longrope_fields(config: Config, fields: dict[str, Any], max_position: int) -> dict[str, Any]:
    """The fields of a longrope, completed from the lengths in the config.

    Raises:
      ModelError: it lacks a list of factors.
    """
    fields = _with_trained_length(config, "longrope", fields, max_position)
    configured = size(config, "max_position_embeddings", max_position)
    fields["max_position"] = configured
    fields.setdefault("factor", configured / fields["original_max_position"])
    for name in ("short_factor", "long_factor"):
        if name not in fields:
            raise ModelError(f"rope_type 'longrope' lacks its {name!r}")
        fields[name] = tuple(fields[name])
    return fields


def _with_trained_length(
    config: Config, kind: str, fields: dict[str, Any], max_position: int
) -> dict[str, Any]:
    """The fields of a rope, completed as transformers does from the lengths in the config."""
    configured = size(config, "max_position_embeddings", max_position)
    fields = dict(fields)
    # Some configs name the trained length outside of rope_scaling, and that one counts.
    beside = config.get("original_max_position_embeddings")
    if beside is not None:
        fields["original_max_position"] = beside
    if kind == "yarn" and "factor" not in fields and "original_max_position" in fields:
        fields["factor"] = configured / fields["original_max_position"]
    fields.setdefault("original_max_position", configured)
    return fields


def context(config: Config, rope: RopeConfig | None, default: int = MAX_POSITION) -> int:
    """The tokens that a model with this rope reads: ``max_position``, stretched or not.

    Configs of YaRN may keep the trained length in ``max_position_embeddings``, as its documented
    form does, or hold the stretched one. Those of a linear rope keep the trained length, by
    transformers' documentation. The other kinds count all positions already.

    Raises:
      ModelError: it is no size that an array can have.
    """
    configured = size(config, "max_position_embeddings", default)
    if rope is None:
        return configured
    stretched = float(configured)
    if rope.kind == "yarn":
        stretched = rope.factor * rope.original_max_position
    elif rope.kind == "linear":
        stretched = rope.factor * configured
    holder = f"config.json: with factor {rope.factor:g} of the rope, "
    whole_part = int(stretched)
    require(holder, "the context", max(configured, whole_part), whole(), ModelError)
    return max(configured, whole_part)


def context_to_hf(cfg: ModelConfig) -> int:
    """``max_position_embeddings`` for which :func:`context` is the config's ``max_position``."""
    rope = cfg.rope
    if rope is None or rope.kind != "linear" or rope.factor <= 1:
        return cfg.max_position
    # Rounding hides the errors of the product: its whole part is at most one below it.
    return math.ceil(round(cfg.max_position / rope.factor, 6))


def _check_rope(rope: RopeConfig) -> None:
    """Refuses settings with which interpolating between frequencies divides by zero."""
    holder = "config.json: rope_scaling."
    if rope.kind == "llama3":
        above = number(rope.low_freq_factor, above=True)
        require(holder, "high_freq_factor", rope.high_freq_factor, above, ModelError)
    if rope.kind == "yarn":
        require("config.json: ", "rope_theta", rope.theta, number(1, above=True), ModelError)
        expected = number(0, rope.beta_fast, above=True, below=True)
        require(holder, "beta_slow", rope.beta_slow, expected, ModelError)


def rope_to_hf(rope: RopeConfig) -> dict[str, Any] | None:
    """``rope_scaling`` of a config.json; ``rope_theta`` is written beside it."""
    if rope.kind == "default":
        return None
    llama3_only = [name for name in _ROPE_FIELDS if name.endswith("_freq_factor")]
    if rope.kind == "llama3":
        names = ["factor", *llama3_only, "original_max_position_embeddings"]
    elif rope.kind == "longrope":
        names = ["factor", "attention_factor", "short_factor", "long_factor"]
    elif rope.kind == "yarn":
        others = (*llama3_only, "short_factor", "long_factor")
        names = [name for name in _ROPE_FIELDS if name not in others]
    else:
        names = ["factor"]

    scaling: dict[str, Any] = {"rope_type": rope.kind}
    for name in names:
        value = getattr(rope, _ROPE_FIELDS[name])
        if value is not None:
            scaling[name] = list(value) if isinstance(value, tuple) else value
    return scaling
