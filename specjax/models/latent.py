"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, §2.1).

Keys and values of all heads are made of one small latent vector per token. Only that vector and one
rotated key, which all heads share, are cached.

The inference layout never makes keys and values: the matrices that would make them are absorbed
into the queries and the results. Every head then attends to the latent itself, which is key and
value at once. The training layout makes keys and values, since whole sequences attend to those with
fewer products.

Axis legend: B rows, N tokens, D hidden size, H heads, R rank of the latent, P rotated entries, E
other entries of a head, V entries of a head's value, S = R + P.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from specjax.models.config import LatentConfig, ModelConfig
from specjax.models.layers import Linear, RMSNorm, Table, rotate
from specjax.models.quantized import is_quantized

NORM_EPS = 1e-6  # of the latents, whatever the config's


class LatentAttention(nnx.Module):
    """Latent attention, absorbed if ``fused``."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, fused: bool, std: float):
        latent = _latent_of(cfg)
        self.cfg = cfg
        self.fused = fused
        d = cfg.hidden_size
        h = cfg.num_heads
        queries = h * cfg.head_dim
        bias = cfg.attention_bias

        def linear(shape: tuple[int, int], axes: tuple[str, str], bias: bool = False, **options):
            return Linear(shape, axes, bias, cfg.shards, rngs, **options)

        if latent.query_rank is None:
            self.q = linear((queries, d), ("heads", "hidden"))
        else:
            self.q_down = linear((latent.query_rank, d), ("latent", "hidden"), bias)
            self.q_norm = RMSNorm(latent.query_rank, NORM_EPS, "latent")
            self.q_up = linear((queries, latent.query_rank), ("heads", "latent"))
        self.kv_down = linear((latent.size, d), ("latent", "hidden"), bias)
        self.kv_norm = RMSNorm(latent.rank, NORM_EPS, "latent")
        if fused:
            axes = ("heads", "head", "latent")
            self.key_up = nnx.Param(jnp.zeros((h, latent.plain, latent.rank)), axes=axes)
            self.value_up = nnx.Param(jnp.zeros((h, latent.value, latent.rank)), axes=axes)
        else:
            rows = h * (latent.plain + latent.value)
            self.kv_up = linear((rows, latent.rank), ("heads", "latent"))
        self.out = linear((d, h * latent.value), ("hidden", "heads"), bias, std=std)

    def __call__(self, x: Float[Array, "B N D"], table: Table, attend: Callable[..., Array]):
        latent = _latent_of(self.cfg)
        queries = self._queries(x)
        plain = queries[..., : latent.plain]
        rotated = self._rotated(queries[..., latent.plain :], table)
        joined = self.kv_down(x)
        vector = self.kv_norm(joined[..., : latent.rank])[:, :, None]
        key = self._rotated(joined[..., latent.rank :][:, :, None], table)
        run = self._absorbed if self.fused else self._expanded
        return self.out(run(plain, rotated, vector, key, attend))

    def _queries(self, x: Float[Array, "B N D"]) -> Float[Array, "B N H E+P"]:
        if _latent_of(self.cfg).query_rank is None:
            queries = self.q(x)
        else:
            queries = self.q_up(self.q_norm(self.q_down(x)))
        return queries.reshape(*x.shape[:2], -1, self.cfg.head_dim)

    def _rotated(self, x: Float[Array, "B N _ P"], table: Table) -> Float[Array, "B N _ P"]:
        assert table.cos is not None and table.sin is not None, "every latent model has a rope"
        return rotate(x, table.cos, table.sin, self.cfg.rope_interleaved)

    def _absorbed(
        self,
        plain: Float[Array, "B N H E"],
        rotated: Float[Array, "B N H P"],
        vector: Float[Array, "B N 1 R"],
        key: Float[Array, "B N 1 P"],
        attend: Callable[..., Array],
    ) -> Float[Array, "B N H*V"]:
        """Every head attends to the latent: its key matrix is part of the query (§2.1.2)."""
        absorbed = jnp.einsum("bnhe,her->bnhr", plain, self.key_up[...])
        queries = jnp.concatenate([absorbed, rotated], axis=-1)
        keys = jnp.concatenate([vector, key], axis=-1)
        # The rotated part of a latent is no value: its sums are cut off.
        out = attend(queries, keys, None)[..., : vector.shape[-1]]
        values = jnp.einsum("bnhr,hvr->bnhv", out, self.value_up[...])
        return values.reshape(*values.shape[:2], -1)

    def _expanded(
        self,
        plain: Float[Array, "B N H E"],
        rotated: Float[Array, "B N H P"],
        vector: Float[Array, "B N 1 R"],
        key: Float[Array, "B N 1 P"],
        attend: Callable[..., Array],
    ) -> Float[Array, "B N H*V"]:
        """Every head attends to keys and values of its own, made of the latent."""
        latent = _latent_of(self.cfg)
        b, n, h, _ = plain.shape
        made = self.kv_up(vector[:, :, 0]).reshape(b, n, h, -1)
        keys = jnp.concatenate(
            [made[..., : latent.plain], jnp.broadcast_to(key, (b, n, h, key.shape[-1]))], axis=-1
        )
        values = made[..., latent.plain :]
        # Attention takes keys and values of one size.
        size = max(self.cfg.head_dim, latent.value)
        queries = jnp.concatenate([plain, rotated], axis=-1)
        queries, keys, values = (_pad(x, size) for x in (queries, keys, values))
        out = attend(queries, keys, values)[..., : latent.value]
        return out.reshape(b, n, -1)


def _pad(x: Float[Array, "B N H _"], size: int) -> Float[Array, "B N H size"]:
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, size - x.shape[-1])))


def _latent_of(cfg: ModelConfig) -> LatentConfig:
    assert cfg.latent is not None, "only a latent model has such attention"
    return cfg.latent


def absorb(attention: dict) -> dict:
    """One layer's attention in the inference layout: ``kv_up`` as ``key_up`` and ``value_up``.

    The sizes follow from the shapes of the weights.
    """
    attention = dict(attention)
    weight = attention.pop("kv_up")["weight"]
    if is_quantized(weight):
        weight = weight.dense(weight.dtype)
    rank = attention["kv_norm"]["weight"].shape[0]
    rotated = attention["kv_down"]["weight"].shape[0] - rank
    values = attention["out"]["weight"].shape[1]
    queries = attention["q_up" if "q_up" in attention else "q"]["weight"].shape[0]
    plain = weight.shape[0] - values  # of all heads together, as the two above
    heads = (queries - plain) // rotated
    by_head = weight.reshape(heads, -1, rank)
    size = plain // heads
    return attention | {"key_up": by_head[:, :size], "value_up": by_head[:, size:]}
