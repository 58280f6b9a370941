"""A file's metadata as a ``config.json``, which the families then read as any other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from specjax._util.checks import (
    FLAG,
    POSITIVE,
    TEXT,
    Check,
    either,
    list_of,
    one_of,
    quoted,
    require_all,
    satisfying,
    whole,
)
from specjax._util.errors import ModelError
from specjax.models.config import ModelConfig
from specjax.models.families import from_hf
from specjax.models.gguf.header import Header
from specjax.models.gguf.names import EMBEDDING, HEAD, NAMES, ROPE_FACTORS
from specjax.models.hf.config import MAX_LAYERS
from specjax.models.layers import rope_frequencies

ARCHITECTURE = "general.architecture"
# Architectures whose models transformers knows under another name.
_MODEL_TYPES = {"gemma3": "gemma3_text", "gptneox": "gpt_neox"}
TOKENIZER = "tokenizer.ggml."  # what the keys of the tokenizer begin with
TOKENS = f"{TOKENIZER}tokens"
TOKEN_TYPES = f"{TOKENIZER}token_type"
CONTROL = 3  # token types: a special token, and one that a user defined
USER_DEFINED = 4
STRINGS = satisfying(
    "a list of texts", lambda value: type(value) is list and set(map(type, value)) <= {str}
)
NUMBERS = satisfying(
    "a list of numbers",
    lambda value: type(value) is list and set(map(type, value)) <= {int, float},
)
# The keys that name the end of a text, a turn and a message. Many files name the first alone; the
# others are then the tokens with these texts, as in llama.cpp.
_ENDS = {
    "eos_token_id": (),
    "eot_token_id": ("<end_of_turn>", "<|eot_id|>", "<|im_end|>", "<|end|>", "<EOT>"),
    "eom_token_id": ("<|eom_id|>",),
}

_HEADS = either(whole(), list_of(whole()))  # one number, or one for each layer
_PATTERN = either(whole(), list_of(FLAG))
# The keys that are read, each after the architecture's name: the config's key, and the check.
_KEYS: dict[str, tuple[str, Check]] = {
    "embedding_length": ("hidden_size", whole()),
    "block_count": ("num_hidden_layers", whole(1, MAX_LAYERS)),
    "feed_forward_length": ("intermediate_size", _HEADS),
    "context_length": ("max_position_embeddings", whole()),
    "attention.head_count": ("num_attention_heads", _HEADS),
    "attention.head_count_kv": ("num_key_value_heads", _HEADS),
    "attention.key_length": ("head_dim", whole()),
    "attention.value_length": ("value_dim", whole()),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", POSITIVE),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", POSITIVE),
    "attention.sliding_window": ("sliding_window", whole()),
    "attention.sliding_window_pattern": ("sliding_window_pattern", _PATTERN),
    "attn_logit_softcapping": ("attn_logit_softcapping", POSITIVE),
    "final_logit_softcapping": ("final_logit_softcapping", POSITIVE),
    "use_parallel_residual": ("use_parallel_residual", FLAG),
    "rope.dimension_count": ("rotary_dim", whole()),
    "rope.freq_base": ("rope_theta", POSITIVE),
    "rope.freq_base_swa": ("rope_local_base_freq", POSITIVE),
    "rope.scaling.type": ("rope_type", one_of("none", "linear", "yarn")),
    "rope.scale_linear": ("factor", POSITIVE),  # of old files; the next one counts before it
    "rope.scaling.factor": ("factor", POSITIVE),
    "rope.scaling.original_context_length": ("original_max_position_embeddings", whole()),
    "rope.scaling.attn_factor": ("attention_factor", POSITIVE),
    "rope.scaling.yarn_beta_fast": ("beta_fast", POSITIVE),
    "rope.scaling.yarn_beta_slow": ("beta_slow", POSITIVE),
    "expert_count": ("experts", whole(0)),
}
_ROPE_KEYS = (
    "rope_type",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
)
# What every Llama 3.1 to 3.3 has; their converter keeps only what it comes to, per frequency.
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Gemma's largest models scale attention by the hidden size per head, the others by the head's.
_SCALED_BY_HIDDEN = {("gemma2", 46), ("gemma3", 62)}  # by their number of layers


def config_of(header: Header, rope_factors: Callable[[], np.ndarray]) -> ModelConfig:
    """The architecture that a file describes.

    Args:
      rope_factors: reads the tensor ``rope_freqs.weight``; it is called where the file has it.
    Raises:
      ModelError: the architecture is not among :data:`~specjax.models.gguf.names.NAMES`, or a
        value is missing, wrong, or not supported.
    """
    architecture = _architecture(header)
    try:
        config = _config_json(header, architecture)
        cfg = from_hf(config)
        if ROPE_FACTORS in header.tensors:
            cfg = _with_llama3_rope(config, cfg, rope_factors())
    except ModelError as error:
        text = str(error).replace("config.json", "metadata")
        if not text.startswith(str(header.path)):
            text = f"{header.path}: {text}"
        raise ModelError(text) from None
    return cfg


def _architecture(header: Header) -> str:
    architecture = header.metadata.get(ARCHITECTURE)
    parts = header.metadata.get("split.count")
    if type(parts) is int and parts > 1:
        raise ModelError(
            f"{header.path}: one of {parts} parts; join them first, with llama-gguf-split --merge"
        )
    if architecture not in NAMES:
        raise ModelError(
            f"{header.path}: {ARCHITECTURE} {quoted(architecture)} is not supported; supported: "
            f"{', '.join(NAMES)}"
        )
    return architecture


def _config_json(header: Header, architecture: str) -> dict[str, Any]:
    """The ``config.json`` that a file's metadata amount to."""
    values = _values(header, architecture)
    rotary = values.pop("rotary_dim", None)
    config = values | {
        "model_type": _MODEL_TYPES.get(architecture, architecture),
        "vocab_size": _vocab_size(header),
        "tie_word_embeddings": HEAD not in header.tensors,
    }
    config |= _ids(header, config["vocab_size"])
    layers = config["num_hidden_layers"]
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
        if "sliding_window" in config:
            config["model_type"] = "mistral"
    elif architecture == "gptneox":
        config["layer_norm_eps"] = config.pop("layer_norm_epsilon", None)
    elif architecture == "bloom":
        config["seq_length"] = config.pop("max_position_embeddings", None)
    elif architecture.startswith("gemma"):
        _add_gemma(config, architecture, layers)

    if rotary is not None and "num_attention_heads" in config:
        _add_rotary(config, architecture, rotary)
    return config


def _values(header: Header, architecture: str) -> dict[str, Any]:
    """The values that are read, under the config's names of them; scaling of the rope inside.

    Raises:
      ModelError: a value has a wrong type or is out of range, or its feature is not supported.
    """
    stored = {f"{architecture}.{key}": entry for key, entry in _KEYS.items()}
    checks = {key: check for key, (_, check) in stored.items()}
    checks["general.name"] = TEXT
    require_all(f"{header.path}: ", header.metadata, checks, ModelError)
    values = {}
    for key, (name, _) in stored.items():
        value = header.metadata.get(key)
        if value is not None:
            values[name] = _same_in_all_layers(key, value)
    for key in ("embedding_length", "block_count", "attention.head_count"):
        if f"{architecture}.{key}" not in header.metadata:
            raise ModelError(f"{header.path}: its metadata lacks {architecture}.{key}")

    if values.pop("experts", 0):
        raise ModelError("mixtures of experts are not supported")
    head_dim = values.get("head_dim")
    if values.pop("value_dim", head_dim) != head_dim:
        raise ModelError("keys and values of different sizes are not supported")
    # Without a number of key heads there are as many as query heads.
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    scaling = {name: values.pop(name) for name in _ROPE_KEYS if name in values}
    if "factor" in scaling:
        scaling.setdefault("rope_type", "linear")  # as in llama.cpp
    if scaling.get("rope_type", "none") != "none":
        values["rope_scaling"] = scaling
    return values


def _same_in_all_layers(key: str, value: Any) -> Any:
    """A value, which may be given once for each layer.

    Raises:
      ModelError: it differs between layers.
    """
    if not isinstance(value, list) or key.endswith("pattern"):
        return value
    if len(set(value)) != 1:
        raise ModelError(f"{key} differs between layers, which is not supported")
    return value[0]


def _vocab_size(header: Header) -> int:
    if EMBEDDING not in header.tensors:
        raise ModelError(f"{header.path}: tensor {EMBEDDING} is missing")
    return header.tensors[EMBEDDING].shape[0]


def _ids(header: Header, vocab_size: int) -> dict[str, Any]:
    """The ids of special tokens. A sequence also ends where a turn or a message does."""

    def check(names: Iterable[str]) -> dict[str, Check]:
        return {f"{TOKENIZER}{name}": whole(0, vocab_size - 1) for name in names}

    names = ("bos_token_id", "padding_token_id", *_ENDS)
    require_all(f"{header.path}: ", header.metadata, check(names), ModelError)
    return {
        "bos_token_id": header.metadata.get(f"{TOKENIZER}bos_token_id"),
        "pad_token_id": header.metadata.get(f"{TOKENIZER}padding_token_id"),
        "eos_token_id": _end_ids(header, vocab_size),
    }


def _end_ids(header: Header, vocab_size: int) -> list[int]:
    """The ids that end a sequence: those that the file names, and then those with known texts."""
    lists = {TOKENS: STRINGS, TOKEN_TYPES: NUMBERS}
    require_all(f"{header.path}: ", header.metadata, lists, ModelError)
    named: list[int] = []
    texts: set[str] = set()
    for key, known in _ENDS.items():
        end = header.metadata.get(f"{TOKENIZER}{key}")
        if end is None:
            texts.update(known)
        else:
            named.append(end)
    tokens = header.metadata.get(TOKENS) or []
    types = header.metadata.get(TOKEN_TYPES) or []
    pairs = enumerate(zip(tokens[:vocab_size], types, strict=False))
    added = (CONTROL, USER_DEFINED)
    found = [i for i, (token, kind) in pairs if token in texts and kind in added]
    return list(dict.fromkeys(named + found))


def _add_gemma(config: dict[str, Any], architecture: str, layers: int) -> None:
    """Adds how Gemma scales attention and which layers slide."""
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise ModelError(f"{len(pattern)} entries of a sliding pattern for {layers} layers")
        del config["sliding_window_pattern"]
        kinds = ("full_attention", "sliding_attention")
        config["layer_types"] = [kinds[slides] for slides in pattern]
    if (architecture, layers) in _SCALED_BY_HIDDEN:
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    else:
        config["query_pre_attn_scalar"] = config.get("head_dim", 256)


def _add_rotary(config: dict[str, Any], architecture: str, rotary: int) -> None:
    """Adds what part of each head is rotated.

    Raises:
      ModelError: it is a part, and the family rotates whole heads.
    """
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if architecture == "gptneox":
        config["rotary_pct"] = rotary / head_dim
    elif rotary != head_dim:
        raise ModelError(f"{rotary} of {head_dim} entries of a head are rotated: not supported")


def _with_llama3_rope(config: dict[str, Any], cfg: ModelConfig, factors: np.ndarray) -> ModelConfig:
    """The architecture with Llama 3's rope scaling.

    Raises:
      ModelError: it does not come to the factors in the file.
    """
    scaling = _LLAMA3 | {"factor": float(factors.max())}
    scaled = from_hf(config | {"rope_scaling": scaling})
    if cfg.rope is None or scaled.rope is None:
        raise ModelError(f"tensor {ROPE_FACTORS}: a model without rope has no use for it")
    plain, _ = rope_frequencies(cfg.rope, cfg.head_dim)
    stretched, _ = rope_frequencies(scaled.rope, cfg.head_dim)
    fits = factors.shape == plain.shape and math.isfinite(scaling["factor"])
    if not fits or not np.allclose(plain / stretched, factors, rtol=1e-4):
        raise ModelError(
            f"tensor {ROPE_FACTORS} is no rope scaling of Llama 3, others are not read"
        )
    return scaled
