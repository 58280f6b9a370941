"""The Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Llama 1/2/3.x, CodeLlama, TinyLlama and Mistral differ only in :class:`ModelConfig`.
Where keys and values live is not known here: ``attend(layer, q, k, v)`` is passed in, so
training, prefill, decoding and token trees run the same module.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax.models.config import ModelConfig
from specjax.models.layers import Linear, RMSNorm, rope_table, rotate

# attend(layer, q[B,N,H,E], k[B,N,K,E], v[B,N,K,E]) -> [B,N,H,E]
Attend = Callable[[int, Array, Array, Array], Array]


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, fused: bool):
        self.cfg, self.fused = cfg, fused
        q, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        if fused:
            self.qkv = Linear(cfg.hidden_size, q + 2 * kv, cfg.attention_bias, rngs)
        else:
            self.q = Linear(cfg.hidden_size, q, cfg.attention_bias, rngs)
            self.k = Linear(cfg.hidden_size, kv, cfg.attention_bias, rngs)
            self.v = Linear(cfg.hidden_size, kv, cfg.attention_bias, rngs)
        self.out = Linear(q, cfg.hidden_size, cfg.attention_bias, rngs, _residual_std(cfg))

    def __call__(self, x, table, attend: Callable[[Array, Array, Array], Array]):
        h, k = self.cfg.num_heads, self.cfg.num_kv_heads
        b, n, _ = x.shape
        if self.fused:
            qkv = self.qkv(x)
        else:
            qkv = jnp.concatenate([self.q(x), self.k(x), self.v(x)], axis=-1)
        qkv = qkv.reshape(b, n, h + 2 * k, self.cfg.head_dim)
        turned = rotate(qkv[:, :, : h + k], *table)
        out = attend(turned[:, :, :h], turned[:, :, h:], qkv[:, :, h + k :])
        return self.out(out.reshape(b, n, -1))


class MLP(nnx.Module):
    """SwiGLU: ``down(silu(gate x) · up x)``."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, fused: bool):
        self.fused = fused
        d, f = cfg.hidden_size, cfg.intermediate_size
        if fused:
            self.gate_up = Linear(d, 2 * f, cfg.mlp_bias, rngs)
        else:
            self.gate = Linear(d, f, cfg.mlp_bias, rngs)
            self.up = Linear(d, f, cfg.mlp_bias, rngs)
        self.down = Linear(f, d, cfg.mlp_bias, rngs, _residual_std(cfg))

    def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        if self.fused:
            gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        else:
            gate, up = self.gate(x), self.up(x)
        return self.down(jax.nn.silu(gate) * up)


class Block(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, fused: bool):
        self.attention_norm = RMSNorm(cfg.hidden_size, cfg.norm_eps)
        self.attention = Attention(cfg, rngs, fused)
        self.mlp_norm = RMSNorm(cfg.hidden_size, cfg.norm_eps)
        self.mlp = MLP(cfg, rngs, fused)

    def __call__(self, x, table, attend):
        x = x + self.attention(self.attention_norm(x), table, attend)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nnx.Module):
    """Token ids and positions to final-normed hidden states ``[B, N, D]``.

    ``fused`` joins q, k, v and gate, up into one product each: an inference-time layout
    (:func:`fuse`), never seen by training or saving.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, fused: bool = False):
        self.cfg = cfg
        init = nnx.initializers.normal(0.02)
        self.embed = nnx.Param(init(rngs.params(), (cfg.vocab_size, cfg.hidden_size), jnp.float32))
        self.layers = nnx.Dict({str(i): Block(cfg, rngs, fused) for i in range(cfg.num_layers)})
        self.norm = RMSNorm(cfg.hidden_size, cfg.norm_eps)
        if not cfg.tie_embeddings:
            head = init(rngs.params(), (cfg.vocab_size, cfg.hidden_size), jnp.float32)
            self.head = nnx.Param(head)

    def __call__(
        self,
        tokens: Int[Array, "B N"],
        positions: Int[Array, "B N"],
        attend: Attend,
        remat: bool = False,
    ) -> Float[Array, "B N D"]:
        cfg = self.cfg
        # Padding ids (out of range by convention) read row 0 instead of NaN fill.
        x = jnp.take(self.embed[...], tokens, axis=0, mode="clip")
        table = rope_table(cfg.rope, cfg.head_dim, positions)
        for i in range(cfg.num_layers):
            block = self.layers[str(i)]

            def run(block, x, i=i):
                return block(x, table, lambda q, k, v: attend(i, q, k, v))

            x = (nnx.remat(run) if remat else run)(block, x)
        return self.norm(x)


def _residual_std(cfg: ModelConfig) -> float:
    """Initial scale of what is added to the residual stream, shrunk with depth (GPT-2)."""
    return 0.02 / (2 * cfg.num_layers) ** 0.5


def fuse(params: dict) -> dict:
    """The params of ``Llama(..., fused=True)``: q, k, v and gate, up joined row-wise."""
    return params | {"layers": {i: fuse_layer(block) for i, block in params["layers"].items()}}


def fuse_layer(block: dict) -> dict:
    """One layer of :func:`fuse`, for loading, which drops each plain layer as it goes."""

    def join(parts: list[dict]) -> dict:
        return {name: jnp.concatenate([p[name] for p in parts]) for name in parts[0]}

    a, m = block["attention"], block["mlp"]
    attention = {"qkv": join([a["q"], a["k"], a["v"]]), "out": a["out"]}
    mlp = {"gate_up": join([m["gate"], m["up"]]), "down": m["down"]}
    return block | {"attention": attention, "mlp": mlp}
