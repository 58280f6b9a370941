"""What model families are made of: attention, MLP, the stack of blocks, the fused layout.

The config says which switches are on; a family says in which order attention, MLP and norms follow
each other. This file does not know where keys and values are stored: ``attend(layer, q, k, v)`` is
passed in. So training, prefill, decoding and token trees run the same module.

Axis legend: B rows, N tokens, P auxiliary layers, D hidden size, H query heads, K key heads, E head
size.
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
from specjax.models.quantized import join as join_outputs
from specjax.models.sharding import constrain

# attend(layer, q[B,N,H,E], k[B,N,K,E], v[B,N,K,E]) -> [B,N,H,E]
Attend = Callable[[int, Array, Array, Array], Array]
Table = tuple[Array, Array] | None  # cos and sin of rotary positions, if there are any
# Whether the backward pass recomputes a block: all of it, or all but the attention of long
# sequences.
Remat = bool | Literal["attention"]


class Attention(nnx.Module):
    """Grouped-query self-attention; q and k are normed and rotated if the config says so.

    ``input_size`` is the hidden size by default.
    """

    def __init__(
        self, cfg: ModelConfig, rngs: nnx.Rngs, fused: bool, input_size: int | None = None
    ):
        self.cfg = cfg
        self.fused = fused
        d = cfg.hidden_size
        q = cfg.num_heads * cfg.head_dim
        kv = cfg.num_kv_heads * cfg.head_dim
        inputs = input_size or d
        bias = cfg.attention_bias or cfg.qkv_bias
        std = _residual_std(cfg)
        if fused:
            self.qkv = Linear((q + 2 * kv, inputs), ("heads", "hidden"), bias, cfg.shards, rngs)
        else:
            self.q = Linear((q, inputs), ("heads", "hidden"), bias, cfg.shards, rngs)
            self.k = Linear((kv, inputs), ("heads", "hidden"), bias, cfg.shards, rngs)
            self.v = Linear((kv, inputs), ("heads", "hidden"), bias, cfg.shards, rngs)
        self.out = Linear((d, q), ("hidden", "heads"), cfg.attention_bias, cfg.shards, rngs, std)
        if cfg.qk_norm:
            self.q_norm = NORMS[cfg.norm](cfg.head_dim, cfg.norm_eps, "head")
            self.k_norm = NORMS[cfg.norm](cfg.head_dim, cfg.norm_eps, "head")

    def __call__(self, x, table: Table, attend: Callable[[Array, Array, Array], Array]):
        b, n, _ = x.shape
        project = self._project_fused if self.fused else self._project
        q, k, v = project(x, lambda x: x.reshape(b, n, -1, self.cfg.head_dim), table)
        return self.out(attend(q, k, v).reshape(b, n, -1))

    def _project(self, x, split_heads: Callable[[Array], Array], table: Table):
        """q, k and v as three products: training would copy long sequences to join and split."""
        q, k, v = (split_heads(linear(x)) for linear in (self.q, self.k, self.v))
        if self.cfg.qk_norm:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if table is not None:
            q = rotate(q, *table)
            k = rotate(k, *table)
        return q, k, v

    def _project_fused(self, x, split_heads: Callable[[Array], Array], table: Table):
        """q, k and v as one product.

        q and k stay joined until they are rotated: fewer and larger operations. At 13M parameters
        half of a decoding step on a CPU is the fixed cost of small ones, 20 to 40 µs each.
        """
        h = self.cfg.num_heads
        k = self.cfg.num_kv_heads
        qkv = split_heads(self.qkv(x))
        qk = qkv[:, :, : h + k]
        if self.cfg.qk_norm:
            qk = jnp.concatenate([self.q_norm(qk[:, :, :h]), self.k_norm(qk[:, :, h:])], axis=2)
        if table is not None:
            qk = rotate(qk, *table)
        return qk[:, :, :h], qk[:, :, h:], qkv[:, :, h + k :]


class MLP(nnx.Module):
    """``down(act(gate x) · up x)``, or ``down(act(up x))`` without a gate."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, fused: bool):
        self.cfg = cfg
        self.fused = fused
        d = cfg.hidden_size
        f = cfg.intermediate_size
        bias = cfg.mlp_bias
        if not cfg.gated_mlp:
            self.up = Linear((f, d), ("columns", "hidden"), bias, cfg.shards, rngs)
        elif fused:
            self.gate_up = Linear((2 * f, d), ("columns", "hidden"), bias, cfg.shards, rngs)
        else:
            self.gate = Linear((f, d), ("columns", "hidden"), bias, cfg.shards, rngs)
            self.up = Linear((f, d), ("columns", "hidden"), bias, cfg.shards, rngs)
        std = _residual_std(cfg)
        self.down = Linear((d, f), ("hidden", "columns"), bias, cfg.shards, rngs, std)

    def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        act = ACTIVATIONS[self.cfg.activation]
        if not self.cfg.gated_mlp:
            return self.down(act(self.up(x)))
        if self.fused:
            gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        else:
            gate = self.gate(x)
            up = self.up(x)
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

    A family sets ``block`` and overrides the methods that differ. ``fused`` joins q, k, v and gate,
    up into one product each (:func:`fuse`). That layout is for inference only; training and saving
    never see it.
    """

    block: type[Block] = Block

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, fused: bool = False):
        self.cfg = cfg
        embed_size = cfg.embed_size or cfg.hidden_size
        self.embed = make_table((cfg.vocab_size, embed_size), ("vocab", "embedding"), rngs)
        blocks = {str(i): self.block(cfg, rngs, fused) for i in range(cfg.num_layers)}
        self.layers = nnx.Dict(blocks)
        if cfg.final_norm:
            self.norm = NORMS[cfg.norm](cfg.hidden_size, cfg.norm_eps)
        if not cfg.tie_embeddings:
            self.head = make_table((cfg.vocab_size, embed_size), ("vocab", "embedding"), rngs)

    def inputs(self, tokens: Int[Array, "B N"], positions: Int[Array, "B N"]):
        """The first block's input ``[B, N, D]``."""
        return self.embedded(tokens)

    def embedded(self, tokens: Int[Array, "B N"]) -> Float[Array, "B N D"]:
        """The tokens' embeddings, not projected."""
        return sharding.look_up(self.embed[...], tokens, self.cfg.vocab_size)

    def tables(self, positions: Int[Array, "B N"]) -> list[Table]:
        """Each layer's rotary table."""
        cfg = self.cfg
        if cfg.rope is None:
            return [None] * cfg.num_layers
        return [rope_table(cfg.rope, cfg.rotary_dim or cfg.head_dim, positions)] * cfg.num_layers

    def outputs(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        """The output head's input, from the last block's output."""
        if not self.cfg.final_norm:
            return x
        return self.norm(x)

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
        """The hidden states, and the inputs of the P ``aux_layers``; None if there are none.

        ``features`` are what a draft head reads beside its tokens. ``rows`` is the sharding of the
        batch's rows. Every block's input and output is constrained to it. A device then works on
        its own rows with weights gathered for one block, never on a part of each row's hidden size.
        """
        x = constrain(self.inputs(tokens, positions), rows)
        tables = self.tables(positions)
        aux_states = None
        if aux_layers:
            aux_states = jnp.zeros((*x.shape[:2], len(aux_layers), x.shape[2]), x.dtype)
        first = 0
        if scan:
            x, aux_states, first = self._scan(
                x, aux_states, aux_layers, tables, attend, remat, rows
            )

        # Unrolled for decoding: a scan over stacked layers halves its speed. After a scan only the
        # layers of an incomplete period are left.
        for i in range(first, self.cfg.num_layers):
            aux_states = _record_aux(aux_states, aux_layers, i, x)
            run = _block_runner(tables[i], functools.partial(attend, i), rows)
            if remat:
                run = nnx.remat(run, policy=_remat_policy(remat))
            x = run(self.layers[str(i)], x)
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
        """Runs layers as one ``lax.scan`` over whole periods; also returns how many layers it ran.

        A period is the shortest sequence of layer kinds that repeats. The program holds one period
        whatever the depth. That costs a stacked copy of the params.
        """
        kinds = [
            (window, id(table)) for window, table in zip(self.cfg.windows, tables, strict=True)
        ]
        repeat = period(kinds)
        count = self.cfg.num_layers // repeat * repeat
        blocks = [nnx.split(self.layers[str(i)]) for i in range(count)]
        # Layers at the same index of their period are stacked: one slice per step of the scan. The
        # first period's graphs, tables and `attend` indices then stand for those of every period.
        states = [[state for _, state in blocks[i::repeat]] for i in range(repeat)]
        stacked = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *group) for group in states]

        def run(carry, group):
            x, aux_states = carry
            first, states = group
            for i, state in enumerate(states):
                aux_states = _record_aux(aux_states, aux_layers, first + i, x)
                block = nnx.merge(blocks[i][0], state)
                x = _block_runner(tables[i], functools.partial(attend, i), rows)(block, x)
            return (x, aux_states), None

        if remat:
            # `prevent_cse` keeps XLA from merging the recomputation with the forward pass. Across
            # a scan XLA cannot do so anyway, so it is off.
            run = jax.checkpoint(run, prevent_cse=False, policy=_remat_policy(remat))
        periods = (jnp.arange(0, count, repeat), stacked)
        (x, aux_states), _ = jax.lax.scan(run, (x, aux_states), periods)
        return x, aux_states, count


def _remat_policy(remat: Remat) -> Callable | None:
    """What ``jax.checkpoint`` keeps of a block beside its input; None: nothing."""
    if remat == "attention":
        return jax.checkpoint_policies.save_only_these_names(RESULT)
    return None


def _block_runner(table: Table, attend: Callable, rows: NamedSharding | None) -> Callable:
    """``run(block, x)``. It closes over the table and ``attend``, so remat traces neither."""
    return lambda block, x: constrain(block(constrain(x, rows), table, attend), rows)


def _record_aux(
    aux_states: Float[Array, "B N P D"] | None,
    aux_layers: tuple[int, ...],
    layer: Int[Array, ""] | int,
    x: Float[Array, "B N D"],
) -> Float[Array, "B N P D"] | None:
    """``aux_states`` with ``x`` stored for ``layer``, if that is one of the ``aux_layers``."""
    if aux_states is None or (isinstance(layer, int) and layer not in aux_layers):
        return aux_states
    # Inside a scan the layer's number is traced, so it is compared with all of `aux_layers`.
    is_layer = (np.array(aux_layers) == layer)[:, None]
    return jnp.where(is_layer, x[:, :, None], aux_states)


def make_table(shape: tuple[int, int], axes: tuple[str, str], rngs: nnx.Rngs) -> nnx.Param:
    """A table of random vectors, one per row."""
    init = nnx.initializers.normal(0.02)
    return nnx.Param(init(rngs.params(), shape, jnp.float32), axes=axes)


def _residual_std(cfg: ModelConfig) -> float:
    """The initial scale of what is added to the residual stream; it shrinks with depth (GPT-2)."""
    return 0.02 / (2 * cfg.num_layers) ** 0.5


def fuse(params: dict) -> dict:
    """The params of ``Decoder(..., fused=True)``: q, k, v and gate, up joined row-wise."""
    return params | {"layers": {i: fuse_layer(block) for i, block in params["layers"].items()}}


def fuse_layer(block: dict) -> dict:
    """One layer of :func:`fuse`."""

    def join(module: dict, names: tuple[str, ...], fused_name: str) -> dict:
        parts = [module[name] for name in names]
        rest = {name: part for name, part in module.items() if name not in names}
        fused = {}
        for leaf in parts[0]:
            fused[leaf] = join_outputs([part[leaf] for part in parts])
        return rest | {fused_name: fused}

    attention = join(block["attention"], ("q", "k", "v"), "qkv")
    mlp = block["mlp"]
    if "gate" in mlp:
        mlp = join(mlp, ("gate", "up"), "gate_up")
    return block | {"attention": attention, "mlp": mlp}
