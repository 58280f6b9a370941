"""Times compiling each family, unrolled against scanned: python docs/tools/measure_compile.py

It traces, lowers and compiles without weights: the gradient of a training loss, both ways, and the
pass over 5 tokens per row that verifies a draft, which is always unrolled. The models are narrow,
because compile time grows with the number of operations and hardly with their sizes. It prints the
table of families.md. A cell is relative to the same family's gradient at 12 layers, unrolled.
"""

import time

import jax
import jax.numpy as jnp

from specjax.models import from_hf, hidden_states, init_cache, logits_of, param_shapes
from specjax.models.forward_pass import forward

DEPTHS = 12, 24, 48
ROWS, LENGTH, WINDOW, SLOTS = 2, 128, 5, 256
COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {
    "head_dim": 16,
    "sliding_window": 64,
    "query_pre_attn_scalar": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
OWN = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gpt_neox": {"rotary_pct": 0.25},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_positions": 512, "tie_word_embeddings": True},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "tie_word_embeddings": True},
    "bloom": {"n_head": 4, "seq_length": 512, "tie_word_embeddings": True},
    "gemma2": GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": GEMMA,
}


def main() -> None:
    """Prints one row per family; the first column of times is in seconds."""
    heads = [f"{kind}, {depth}" for kind in ("unrolled", "scanned", "decoding") for depth in DEPTHS]
    print("| `model_type` | seconds |", " | ".join(heads), "|")
    print("| --- |" + " ---: |" * (1 + len(heads)))
    for family in OWN:
        seconds = [gradient(family, depth, scan) for scan in (False, True) for depth in DEPTHS]
        seconds += [decoding(family, depth) for depth in DEPTHS]
        cells = [f"{s / seconds[0]:.2f}" for s in seconds]
        print(f"| `{family}` | {seconds[0]:.1f} |", " | ".join(cells), "|", flush=True)


def config(family: str, depth: int):
    """A narrow model of a family, with ``depth`` layers."""
    layers = {"num_hidden_layers": depth, "n_layer": depth}
    return from_hf(COMMON | OWN[family] | layers | {"model_type": family})


def gradient(family: str, depth: int, scan: bool) -> float:
    """Seconds to compile the gradient of a mean negative log-likelihood."""
    cfg = config(family, depth)

    def loss(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
        hidden = hidden_states(
            cfg, params, tokens, positions, jnp.ones_like(tokens), scan=scan
        ).hidden
        log_p = jax.nn.log_softmax(logits_of(cfg, params, hidden))
        return -jnp.take_along_axis(log_p[:, :-1], tokens[:, 1:, None], -1).mean()

    return compiled(jax.grad(loss), param_shapes(cfg), int32(ROWS, LENGTH))


def decoding(family: str, depth: int) -> float:
    """Seconds to compile a pass over ``WINDOW`` tokens per row with a cache."""
    cfg = config(family, depth)

    def step(params, cache, tokens, start):
        positions = start[:, None] + jnp.arange(WINDOW)
        hidden, cache, _ = forward(cfg, params, cache, tokens, positions, start)
        return logits_of(cfg, params, hidden), cache

    cache = jax.eval_shape(lambda: init_cache(cfg, ROWS, SLOTS, jnp.float32))
    return compiled(step, param_shapes(cfg), cache, int32(ROWS, WINDOW), int32(ROWS))


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of an array of token ids or positions."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def compiled(function, *shapes) -> float:
    """Seconds from a Python function to a program."""
    began = time.perf_counter()
    jax.jit(function).lower(*shapes).compile()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
