"""The tensor names of GGUF files: one table for all architectures."""

from __future__ import annotations

from specjax.models.hf.names import Names

_TABLES = {
    "embed": "token_embd",
    "embed_norm": "token_embd_norm",
    "positions": "position_embd",
    "norm": "output_norm",
}
_BLOCK = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.out": "attn_output",
    "attention_out_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp_out_norm": "post_ffw_norm",
}
ROPE_FACTORS = "rope_freqs.weight"  # of Llama 3.1 and later: what its rope scaling comes to
EMBEDDING = "token_embd.weight"
HEAD = "output.weight"

SEPARATE = Names(layer="blk", modules=_TABLES | _BLOCK, base="", head=HEAD)
# Converters stack q, k and v, whatever the original checkpoint did.
STACKED = Names(layer="blk", modules=_TABLES | _BLOCK, base="", head=HEAD, fused_qkv="attn_qkv")
# The architectures, by their name in the file.
NAMES = {
    "llama": SEPARATE,
    "qwen2": SEPARATE,
    "qwen3": SEPARATE,
    "gemma2": SEPARATE,
    "gemma3": SEPARATE,
    "gpt2": STACKED,
    "gptneox": STACKED,
    "bloom": STACKED,
}
