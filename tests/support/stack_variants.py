"""Tiny random models of the families that are made of switches, each with its switches on.

Unlike :mod:`support.variants` their golden outputs are short, and all in one file.
"""

from __future__ import annotations

from typing import Any

_BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_PARTLY = {"rope_type": "default", "rope_theta": 1e4}
_SLIDES = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

DENSE: dict[str, dict[str, Any]] = {
    "arcee": {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "cohere": {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.5},
    "cohere2": _SLIDES | {"attention_bias": True, "logit_scale": 0.5, "tie_word_embeddings": True},
    "cwm": _SLIDES
    | {
        "head_dim": 16,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "ernie4_5": {"use_bias": True, "head_dim": 16},
    "exaone4": _SLIDES | {"rms_norm_eps": 1e-5},
    "falcon": {
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        "bias": True,
        "ffn_hidden_size": 48,
        "num_key_value_heads": ...,
        "intermediate_size": ...,
    },
    "falcon-7b": {"multi_query": True, "num_key_value_heads": ..., "intermediate_size": ...},
    "falcon-sequential": {
        "multi_query": False,
        "parallel_attn": False,
        "num_key_value_heads": ...,
        "intermediate_size": ...,
    },
    "gemma": {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    "glm": {"head_dim": 16, "attention_bias": True},
    "glm4": {"head_dim": 16, "attention_bias": True},
    "gptj": {
        "rotary_dim": 4,
        "num_key_value_heads": ...,
        "intermediate_size": ...,
        "n_inner": 48,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "helium": {"head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "hunyuan_v1_dense": {
        "head_dim": 16,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "dynamic",
            "alpha": 50.0,
            "factor": 1.0,
            "rope_theta": 1e4,
        },
    },
    "ministral": _SLIDES | {"head_dim": 16},
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 4,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "nanochat": {"final_logit_softcapping": 3.0},
    "nemotron": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": _PARTLY | {"partial_rotary_factor": 0.5},
    },
    "olmo": {"clip_qkv": 0.5, "attention_bias": True},
    "olmo2": {"attention_bias": True},
    "olmo3": _SLIDES
    | {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.2,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        }
    },
    "phi": {"qk_layernorm": True, "rope_parameters": _PARTLY | {"partial_rotary_factor": 0.5}},
    "phi3": {
        "original_max_position_embeddings": 4,
        "sliding_window": 9,
        "rope_parameters": _PARTLY
        | {
            "rope_type": "longrope",
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5],
            "long_factor": [2.0, 3.0],
        },
    },
    "seed_oss": {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "smollm3": {"no_rope_layers": [1, 0], "attention_bias": True, "mlp_bias": True},
    "smollm3-windows": {
        "no_rope_layers": [0, 1],
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "stablelm": {
        "qk_layernorm": True,
        "use_qkv_bias": True,
        "use_parallel_residual": True,
        "rope_parameters": _PARTLY | {"partial_rotary_factor": 0.5},
    },
    "stablelm-sequential": {"rope_parameters": _PARTLY | {"partial_rotary_factor": 0.25}},
    "starcoder2": {"sliding_window": 5, "use_bias": True},
}
_SOFTMAX = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": _SOFTMAX | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    "qwen3_moe": _SOFTMAX | {"norm_topk_prob": True, "attention_bias": True, "head_dim": 16},
    "qwen3_moe-interleaved": _SOFTMAX | {"decoder_sparse_step": 2, "head_dim": 16},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "attention_bias": True},
    "granitemoe": DENSE["granite"]
    | {"num_local_experts": 5, "num_experts_per_tok": 2, "mlp_bias": ...},
    "glm4_moe": _GROUPED
    | {
        "head_dim": 16,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_parameters": _PARTLY | {"partial_rotary_factor": 0.5},
    },
    "gpt_oss": _SLIDES
    | {
        "head_dim": 16,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_LATENT = _GROUPED | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT
    | {
        "topk_method": "group_limited_greedy",
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 32,
        },
    },
    "deepseek_v2-lite": _LATENT
    | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "deepseek_v3": _LATENT
    | {
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 32,
        },
    },
    "deepseek_v3-halves": _LATENT | {"rope_interleave": False, "n_group": 1, "topk_group": 1},
}
CHUNKED: dict[str, dict[str, Any]] = {
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size": 24,
        "intermediate_size_mlp": 48,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "moe_layers": [1],
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 5,
        "floor_scale": 4,
        "attn_scale": 0.3,
        "attention_bias": True,
    },
}
ALL = DENSE | MIXTURES | LATENT | CHUNKED


def config(name: str) -> dict[str, Any]:
    """The ``config.json`` of a variant, whose name is its ``model_type``, perhaps with more."""
    merged = _BASE | {"model_type": name.split("-")[0]} | ALL[name]
    return {key: value for key, value in merged.items() if value is not ...}
