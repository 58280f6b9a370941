"""Tiny random models, a few per family and switch, the same here and in transformers.

Weights come from NumPy's Philox, seeded by tensor name, so golden files need no weights.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from support import stack_variants

BASE = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama-1": {"rms_norm_eps": 1e-6},
    "tinyllama": {"num_key_value_heads": 2},
    "llama-3.1": {
        "num_key_value_heads": 2,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "codellama": {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    },
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head-dim": {"head_dim": 16, "num_key_value_heads": 1},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 6},
}

_COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN = _COMMON | {
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
_QWEN2 = _QWEN | {"model_type": "qwen2"}
_QWEN3 = _QWEN | {"model_type": "qwen3", "head_dim": 16}
_NEOX = _COMMON | {
    "model_type": "gpt_neox",
    "intermediate_size": 64,
    "tie_word_embeddings": False,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
    "hidden_act": "gelu",
    "num_attention_heads": 2,
}
_GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OPT = _COMMON | {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32}
_BLOOM = {
    "model_type": "bloom",
    "vocab_size": 61,
    "hidden_size": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "seq_length": 128,
}
_GEMMA = _COMMON | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "sliding_window": 5,
    "query_pre_attn_scalar": 24,
    "hidden_activation": "gelu_pytorch_tanh",
}
_GEMMA2 = _GEMMA | {
    "model_type": "gemma2",
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
_GEMMA3 = _GEMMA | {
    "model_type": "gemma3_text",
    "sliding_window_pattern": 2,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}

# Variants of the other families; slow checks use the first one of each family.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": _QWEN2,
    "qwen2-window": _QWEN2
    | {
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": _QWEN3,
    "qwen3-biases": _QWEN3
    | {
        "attention_bias": True,
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "pythia": _NEOX,
    "neox-sequential": _NEOX
    | {
        "use_parallel_residual": False,
        "rotary_pct": 1.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_fast",
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "gpt2": _GPT2,
    "gpt2-inner": _GPT2
    | {"n_inner": 48, "activation_function": "relu", "tie_word_embeddings": False},
    "opt": _OPT,
    "opt-350m": _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 20},
    "opt-no-bias": _OPT
    | {
        "enable_bias": False,
        "_remove_final_layer_norm": True,
        "activation_function": "gelu",
        "tie_word_embeddings": False,
    },
    "bloom": _BLOOM,
    "bloom-6-heads": _BLOOM | {"n_head": 6, "hidden_size": 48, "layer_norm_epsilon": 1e-3},
    "gemma2": _GEMMA2,
    "gemma2-uncapped": _GEMMA2
    | {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "gemma3": _GEMMA3,
    "gemma3-27b": _GEMMA3
    | {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "final_logit_softcapping": 5.0,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 16,
    },
}
FIRST = {config["model_type"]: name for name, config in reversed(FAMILIES.items())}


def config(name: str) -> dict[str, Any]:
    """The ``config.json`` of a variant."""
    if name in stack_variants.ALL:
        return stack_variants.config(name)
    return FAMILIES[name] if name in FAMILIES else BASE | VARIANTS[name]


def weights(name: str, shape: tuple[int, ...], std: float = 0.2) -> np.ndarray:
    """float32 values fixed by the tensor's name; the scales of norms lie around 1."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    values = np.random.Generator(np.random.Philox(seed)).standard_normal(shape, np.float32)
    is_scale = ("norm" in name or ".ln_" in name) and name.endswith("weight")
    return 1 + 0.1 * values if is_scale else values * np.float32(std)


def std(name: str) -> float:
    """The standard deviation of a variant's weights, by family.

    With other values greedy decoding of random weights soon repeats one token.
    """
    return {"qwen2": 0.5, "qwen3": 0.5, "gpt_neox": 0.4, "bloom": 0.4}.get(
        config(name)["model_type"], 0.2
    )


def tokens(rows: int = 2, length: int = 20) -> np.ndarray:
    """Random token ids, int32 ``[rows, length]``."""
    return np.random.Generator(np.random.Philox(9)).integers(3, 61, (rows, length)).astype(np.int32)


LAST = 4  # tokens of a row whose logits short golden files have
GREEDY_PROMPT, GREEDY_TOKENS = 8, 64  # tokens of a row before greedy decoding, and after

# Draft trees, one per row, each below its own number of committed tokens: parents of 7 nodes,
# node 0 the root. The first one branches, the second is a comb with a late branch.
PREFIXES = (8, 12)
TREES = ((None, 0, 0, 1, 1, 2, 5), (None, 0, 1, 0, 3, 2, 4))
TREE_TOKENS = ((7, 11, 13, 17, 19, 23, 29), (5, 31, 3, 37, 41, 43, 47))
TREE_DEPTH = 3


def path(row: int, node: int) -> list[int]:
    """The nodes from the root of a row's tree to ``node``."""
    parent = TREES[row][node]
    return [node] if parent is None else [*path(row, parent), node]
