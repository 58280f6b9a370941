"""Published shapes, as the checkpoints' config.json files give them, and the drafts for them.

The tools compile them, or run them with random weights.
"""

from __future__ import annotations

from specjax.models import ModelConfig, from_hf
from specjax.models.cache import row_bytes
from specjax.models.quantization import active_bytes


def _llama(hidden: int, layers: int, heads: int, inner: int, tied: bool = False) -> dict:
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": inner,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": tied,
    }


def _qwen3(hidden: int, layers: int, heads: int, inner: int, tied: bool = False) -> dict:
    return {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": inner,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
    }


def _gemma2(hidden: int, layers: int, heads: int, kv_heads: int, inner: int) -> dict:
    return {
        "model_type": "gemma2",
        "vocab_size": 256000,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "intermediate_size": inner,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    }


CODE = {"vocab_size": 32016, "num_key_value_heads": 32, "rope_theta": 1e6}
CONFIGS = {
    "llama-3-70b": _llama(8192, 80, 64, 28672),
    "llama-3-8b": _llama(4096, 32, 32, 14336),
    "llama-3-1b": _llama(2048, 16, 32, 8192, tied=True),
    "codellama-7b": _llama(4096, 32, 32, 11008) | CODE | {"max_position_embeddings": 16384},
    "qwen3-8b": _qwen3(4096, 36, 32, 12288),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "gemma-2-9b": _gemma2(3584, 42, 16, 8, 14336),
    "gemma-2-2b": _gemma2(2304, 26, 8, 4, 9216),
}
CONFIGS["qwen3-30b-a3b"] = CONFIGS["qwen3-8b"] | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
CONFIGS["deepseek-v2-lite"] = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, ModelConfig] = {name: from_hf(config) for name, config in CONFIGS.items()}
DRAFTS = {
    "llama-3-70b": "llama-3-8b",
    "llama-3-8b": "llama-3-1b",
    "qwen3-8b": "qwen3-0.6b",
    "qwen3-30b-a3b": "qwen3-0.6b",
    "gemma-2-9b": "gemma-2-2b",
}


def pass_bytes(cfg: ModelConfig, rows: int, positions: int) -> float:
    """Bytes that a pass must read in bfloat16: weights, and ``positions`` of each row's cache.

    The embedding counts only if the head is tied to it. Of a mixture, each row wakes its own
    experts, which are as distinct as chance makes them.
    """
    table = 0 if cfg.tie_embeddings else 2 * cfg.vocab_size * cfg.hidden_size
    cache = rows * row_bytes(cfg, positions, "bfloat16")
    return active_bytes(cfg, rows, "bfloat16") - table + cache
