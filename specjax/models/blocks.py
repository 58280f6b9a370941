"""What families are made of: attention, MLP, the stack around the blocks, the fused layout.

Which switches are on is the config's; how attention, MLP and norms follow each other is the
family's. Where keys and values live is not known here: ``attend(layer, q, k, v)`` is passed
in, so training, prefill, decoding and token trees run the same module.

Axis legend: B rows, N tokens, D hidden size, H query heads, K key heads, E head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from specjax.models import sharding
from specjax.models.attention.flash import RESULT
from specjax.models.config import ModelConfig, period
from specjax.models.layers import ACTIVATIONS, NORMS, Linear, rope_table, rotate
from specjax.models.sharding import constrain

# attend(layer, q[B,N,H,E], k[B,N,K,E], v[B,N,K,E]) -> [B,N,H,E]
Attend = Callable[[int, Array, Array, Array], Array]
Table = tuple[Array, Array] | None  # cos and sin, where positions turn q and k
# Whether the backward pass recomputes a block: all of it, or all but a long sequence's attention.
Remat = bool | Literal["attention"]


class Attention(nnx.Module):
    """Grouped-query self-attention; q and k are normed and rotated where the config says so.

    ``width``: of what it reads, where that is not the hidden size.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, fused: bool, width: int | None = None):
        self.cfg, self.fused = cfg, fused
        d, q, kv = cfg.hidden_size, cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        bias, std, width = cfg.attention_bias or cfg.qkv_bias, _residual_std(cfg), width or d
        if fused:
            self.qkv = Linear((q + 2 * kv, width), ("heads", "hidden"), bias, cfg.shards, rngs)
        else:
            self.q = Linear((q, width), ("heads", "hidden"), bias, cfg.shards, rngs)
            self.k = Linear((kv, width), ("heads", "hidden"), bias, cfg.shards, rngs)
            self.v = Linear((kv, width), ("heads", "hidden"), bias, cfg.shards, rngs)
        self.out = Linear((d, q), ("hidden", "heads"), cfg.attention_bias, cfg.shards, rngs, std)
        if cfg.qk_norm:
            self.q_norm = NORMS[cfg.norm](cfg.head_dim, cfg.norm_eps, "head")
            self.k_norm = NORMS[cfg.norm](cfg.head_dim, cfg.norm_eps, "head")

    def __call__(self, x, table: Table, attend: Callable[[Array, Array, Array], Array]):
        b, n, _ = x.shape
        heads = self._fused_heads if self.fused else self._heads
        out = attend(*heads(x, lambda x: x.reshape(b, n, -1, self.cfg.head_dim), table))
        return self.out(out.reshape(b, n, -1))

    def _heads(self, x, split: Callable[[Array], Array], table: Table) -> tuple[Array, ...]:
        """q, k and v apart: joined, long sequences would be copied to be joined and parted."""
        q, k, v = (split(linear(x)) for linear in (self.q, self.k, self.v))
        if self.cfg.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if table is not None:
            q, k = rotate(q, *table), rotate(k, *table)
        return q, k, v

    def _fused_heads(self, x, split: Callable[[Array], Array], table: Table) -> tuple[Array, ...]:
        """The same of one product; q and k stay together for fewer, larger steps."""
        h, k = self.cfg.num_heads, self.cfg.num_kv_heads
        qkv = split(self.qkv(x))
        qk = qkv[:, :, : h + k]
        if self.cfg.qk_norm:
            qk = jnp.concatenate([self.q_norm(qk[:, :, :h]), self.k_norm(qk[:, :, h:])], axis=2)
        if table is not None:
            qk = rotate(qk, *table)
        return qk[:, :, :h], qk[:, :, h:], qkv[:, :, h + k :]


class MLP(nnx.Module):
    """``down(act(gate x) · up x)``, or ``down(act(up x))`` without a gate."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, fused: bool):
        self.cfg, self.fused = cfg, fused
        d, f, bias, std = cfg.hidden_size, cfg.intermediate_size, cfg.mlp_bias, _residual_std(cfg)
        if not cfg.gated_mlp:
            self.up = Linear((f, d), ("columns", "hidden"), bias, cfg.shards, rngs)
        elif fused:
            self.gate_up = Linear((2 * f, d), ("columns", "hidden"), bias, cfg.shards, rngs)
        else:
            self.gate = Linear((f, d), ("columns", "hidden"), bias, cfg.shards, rngs)
            self.up = Linear((f, d), ("columns", "hidden"), bias, cfg.shards, rngs)
        self.down = Linear((d, f), ("hidden", "columns"), bias, cfg.shards, rngs, std)

    def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        act = ACTIVATIONS[self.cfg.activation]
        if not self.cfg.gated_mlp:
            return self.down(act(self.up(x)))
        if self.fused:
            gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        else:
            gate, up = self.gate(x), self.up(x)
        return self.down(act(gate) * up)


class Block(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, fused: bool):
        self.cfg = cfg
        self.attention_norm = NORMS[cfg.norm](cfg.hidden_size, cfg.norm_eps)
        self.attention = Attention(cfg, rngs, fused)
        self.mlp_norm = NORMS[cfg.norm](cfg.hidden_size, cfg.norm_eps)
        self.mlp = MLP(cfg, rngs, fused)

    def __call__(self, x, table: Table, attend):
        x = x + self.attention(self.attention_norm(x), table, attend)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """Token ids and positions to final-normed hidden states ``[B, N, D]``.

    A family sets ``block`` and replaces what it does otherwise. ``fused`` joins q, k, v and
    gate, up into one product each: an inference-time layout (:func:`fuse`), never seen by
    training or saving.
    """

    block: type[nnx.Module] = Block

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, fused: bool = False):
        self.cfg = cfg
        width = cfg.embed_size or cfg.hidden_size
        self.embed = make_table((cfg.vocab_size, width), ("vocab", "embedding"), rngs)
        blocks = {str(i): self.block(cfg, rngs, fused) for i in range(cfg.num_layers)}
        self.layers = nnx.Dict(blocks)
        if cfg.final_norm:
            self.norm = NORMS[cfg.norm](cfg.hidden_size, cfg.norm_eps)
        if not cfg.tie_embeddings:
            self.head = make_table((cfg.vocab_size, width), ("vocab", "embedding"), rngs)

    def inputs(self, tokens: Int[Array, "B N"], positions: Int[Array, "B N"]):
        """The first block's input ``[B, N, D]``."""
        return self.embedded(tokens)

    def embedded(self, tokens: Int[Array, "B N"]) -> Float[Array, "B N D"]:
        """The tokens' own vectors, as wide as the embedding."""
        return sharding.look_up(self.embed[...], tokens, self.cfg.vocab_size)

    def tables(self, positions: Int[Array, "B N"]) -> list[Table]:
        """Each layer's rotary table."""
        cfg = self.cfg
        if cfg.rope is None:
            return [None] * cfg.num_layers
        return [rope_table(cfg.rope, cfg.rotary_dim or cfg.head_dim, positions)] * cfg.num_layers

    def outputs(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        """What the head reads."""
        return self.norm(x) if self.cfg.final_norm else x

    def __call__(
        self,
        tokens: Int[Array, "B N"],
        positions: Int[Array, "B N"],
        attend: Attend,
        remat: Remat = False,
        scan: bool = False,
        aux_layers: tuple[int, ...] = (),
        features: Float[Array, "B N D"] | None = None,
        rows: NamedSharding | None = None,
    ) -> tuple[Float[Array, "B N D"], Float[Array, "B N P D"] | None]:
        """The hidden states, and the inputs of the P layers ``aux_layers``; None where there are
        none.

        ``features`` are what a head reads beside its tokens. ``rows`` says where those of a batch
        lie: every block's input and output stays there, so that a device works on its own rows
        with weights that it gathers for one block, and never on a part of each row's width.
        """
        x, tables, first = (
            constrain(self.inputs(tokens, positions), rows),
            self.tables(positions),
            0,
        )
        aux_states = (
            jnp.zeros((*x.shape[:2], len(aux_layers), x.shape[2]), x.dtype) if aux_layers else None
        )
        if scan:
            x, aux_states, first = self._scan(
                x, aux_states, aux_layers, tables, attend, remat, rows
            )
        for i in range(first, self.cfg.num_layers):
            aux_states = _record_aux(aux_states, aux_layers, i, x)
            run = _call(tables[i], functools.partial(attend, i), rows)
            x = (nnx.remat(run, policy=kept(remat)) if remat else run)(self.layers[str(i)], x)
        return self.outputs(x), aux_states

    def _scan(
        self,
        x: Float[Array, "B N D"],
        aux_states: Float[Array, "B N P D"] | None,
        aux_layers: tuple[int, ...],
        tables: list[Table],
        attend: Attend,
        remat: Remat,
        rows: NamedSharding | None,
    ) -> tuple[Float[Array, "B N D"], Float[Array, "B N P D"] | None, int]:
        """Layers as one ``lax.scan`` over whole periods of like ones, and how many it ran.

        The program holds one period whatever the depth. It costs a stacked copy of the params.
        """
        repeat = period(list(zip(self.cfg.windows, map(id, tables), strict=True)))
        count = self.cfg.num_layers // repeat * repeat
        blocks = [nnx.split(self.layers[str(i)]) for i in range(count)]
        states = [[state for _, state in blocks[i::repeat]] for i in range(repeat)]
        stacked = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *group) for group in states]

        def run(carry, group):
            x, aux_states = carry
            first, states = group
            for i, state in enumerate(states):
                aux_states = _record_aux(aux_states, aux_layers, first + i, x)
                block = nnx.merge(blocks[i][0], state)
                x = _call(tables[i], functools.partial(attend, i), rows)(block, x)
            return (x, aux_states), None

        # Inside a scan nothing is merged with the forward pass, so no barrier against it.
        run = jax.checkpoint(run, prevent_cse=False, policy=kept(remat)) if remat else run
        periods = jnp.arange(0, count, repeat), stacked
        return *jax.lax.scan(run, (x, aux_states), periods)[0], count


def kept(remat: Remat) -> Callable | None:
    """What ``jax.checkpoint`` keeps of a block beside its input; None: nothing."""
    if remat == "attention":
        return jax.checkpoint_policies.save_only_these_names(RESULT)
    return None


def _call(table: Table, attend: Callable, rows: NamedSharding | None) -> Callable:
    """Runs a block; what is closed over here is no argument that remat would trace."""
    return lambda block, x: constrain(block(constrain(x, rows), table, attend), rows)


def _record_aux(
    aux_states: Float[Array, "B N P D"] | None,
    aux_layers: tuple[int, ...],
    layer: Int[Array, ""] | int,
    x: Float[Array, "B N D"],
) -> Float[Array, "B N P D"] | None:
    """``aux_states`` with ``x`` at the places of ``layer``, if it is one of the ``aux_layers``."""
    if not aux_layers or (isinstance(layer, int) and layer not in aux_layers):
        return aux_states
    here = (np.array(aux_layers) == layer)[:, None]
    return jnp.where(here, x[:, :, None], aux_states)


def make_table(shape: tuple[int, int], axes: tuple[str, str], rngs: nnx.Rngs) -> nnx.Param:
    """A table of random vectors, ``[rows, width]``."""
    init = nnx.initializers.normal(0.02)
    return nnx.Param(init(rngs.params(), shape, jnp.float32), axes=axes)


def _residual_std(cfg: ModelConfig) -> float:
    """Initial scale of what is added to the residual stream, shrunk with depth (GPT-2)."""
    return 0.02 / (2 * cfg.num_layers) ** 0.5


def fuse(params: dict) -> dict:
    """The params of ``Decoder(..., fused=True)``: q, k, v and gate, up joined row-wise."""
    return params | {"layers": {i: fuse_layer(block) for i, block in params["layers"].items()}}


def fuse_layer(block: dict) -> dict:
    """One layer of :func:`fuse`."""

    def join(module: dict, names: tuple[str, ...], joined: str) -> dict:
        parts = [module[name] for name in names]
        kept = {name: part for name, part in module.items() if name not in names}
        return kept | {joined: {n: jnp.concatenate([p[n] for p in parts]) for n in parts[0]}}

    attention, mlp = join(block["attention"], ("q", "k", "v"), "qkv"), block["mlp"]
    if "gate" in mlp:
        mlp = join(mlp, ("gate", "up"), "gate_up")
    return block | {"attention": attention, "mlp": mlp}
