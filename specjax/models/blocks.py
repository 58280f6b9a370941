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
from specjax.models.config import ModelConfig, QueryScale, period
from specjax.models.experts import Mixture
from specjax.models.latent import LatentAttention, absorb
from specjax.models.layers import (
    ACTIVATIONS,
    NORMS,
    AllHeadsRMSNorm,
    Linear,
    Table,
    rope_table,
    rotate,
)
from specjax.models.quantized import join as join_outputs
from specjax.models.sharding import constrain

# attend(layer, q[B,N,H,E], k[B,N,K,E], v[B,N,K,E], sinks[H] or None) -> [B,N,H,E]
Attend = Callable[[int, Array, Array, Array, Array | None], Array]
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
        self.sinks = nnx.Param(jnp.zeros((cfg.num_heads,)), axes=("heads",)) if cfg.sinks else None
        if cfg.qk_norm:
            self.q_norm = _head_norm(cfg, cfg.num_heads)
            self.k_norm = _head_norm(cfg, cfg.num_kv_heads)

    def __call__(self, x, table: Table, attend: Callable[..., Array]):
        b, n, _ = x.shape
        project = self._project_fused if self.fused else self._project
        q, k, v = project(x, lambda x: x.reshape(b, n, -1, self.cfg.head_dim), table)
        sinks = None if self.sinks is None else self.sinks[...]
        return self.out(attend(q, k, v, sinks).reshape(b, n, -1))

    def _project(self, x, split_heads: Callable[[Array], Array], table: Table):
        """q, k and v as three products: training would copy long sequences to join and split."""
        q, k, v = (self._clipped(split_heads(linear(x))) for linear in (self.q, self.k, self.v))
        if self._norms_before_rope:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = self._rotated(q, table)
        k = self._rotated(k, table)
        if self.cfg.qk_norm_after_rope and table.cos is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        return self._scaled(q, table), k, v

    @property
    def _norms_before_rope(self) -> bool:
        return self.cfg.qk_norm is not None and not self.cfg.qk_norm_after_rope

    def _clipped(self, x: Float[Array, "B N H E"]) -> Float[Array, "B N H E"]:
        limit = self.cfg.attention_clip
        return x if limit is None else jnp.clip(x, -limit, limit)

    def _rotated(self, x: Float[Array, "B N H E"], table: Table) -> Float[Array, "B N H E"]:
        if table.cos is None or table.sin is None:
            return x
        return rotate(x, table.cos, table.sin, self.cfg.rope_interleaved)

    def _scaled(self, q: Float[Array, "B N H E"], table: Table) -> Float[Array, "B N H E"]:
        if table.query_scale is None:
            return q
        return q * table.query_scale[:, :, None, None].astype(q.dtype)

    def _project_fused(self, x, split_heads: Callable[[Array], Array], table: Table):
        """q, k and v as one product.

        q and k stay joined until they are rotated: fewer and larger operations. At 13M parameters
        half of a decoding step on a CPU is the fixed cost of small ones, 20 to 40 µs each.
        """
        h = self.cfg.num_heads
        k = self.cfg.num_kv_heads
        qkv = self._clipped(split_heads(self.qkv(x)))
        qk = qkv[:, :, : h + k]
        if self._norms_before_rope:
            qk = jnp.concatenate([self.q_norm(qk[:, :, :h]), self.k_norm(qk[:, :, h:])], axis=2)
        qk = self._rotated(qk, table)
        if self.cfg.qk_norm_after_rope and table.cos is not None:
            qk = jnp.concatenate([self.q_norm(qk[:, :, :h]), self.k_norm(qk[:, :, h:])], axis=2)
        return self._scaled(qk[:, :, :h], table), qk[:, :, h:], qkv[:, :, h + k :]


class MLP(nnx.Module):
    """``down(act(gate x) · up x)``, or ``down(act(up x))`` without a gate.

    ``columns`` are the config's by default.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, fused: bool, columns: int | None = None):
        self.cfg = cfg
        self.fused = fused
        d = cfg.hidden_size
        f = columns or cfg.intermediate_size
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


def _make_attention(cfg: ModelConfig, rngs: nnx.Rngs, fused: bool) -> Attention | LatentAttention:
    """A layer's attention, to keys and values or to latents."""
    if cfg.latent is None:
        return Attention(cfg, rngs, fused)
    return LatentAttention(cfg, rngs, fused, _residual_std(cfg))


def _make_mlp(cfg: ModelConfig, rngs: nnx.Rngs, fused: bool) -> MLP | Mixture:
    """A layer's MLP, or its experts; a shared expert is never fused."""
    if cfg.experts is None:
        return MLP(cfg, rngs, fused)
    return Mixture(cfg, rngs, _residual_std(cfg), lambda size: MLP(cfg, rngs, False, size))


class Block(nnx.Module):
    """Attention and MLP, each added to the residual stream.

    The config says what is normed: the inputs of the two, their outputs, both, or else the sums. In
    a parallel block both read the block's input.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, fused: bool):
        self.cfg = cfg

        def norm(exists: bool) -> nnx.Module | None:
            return NORMS[cfg.norm](cfg.hidden_size, cfg.norm_eps) if exists else None

        before = cfg.norm_before or not cfg.norm_after
        self.attention_norm = norm(before)
        self.attention = _make_attention(cfg, rngs, fused)
        self.attention_out_norm = norm(cfg.norm_after)
        self.mlp_norm = norm(before and not cfg.shared_norm)
        self.mlp = _make_mlp(cfg, rngs, fused)
        self.mlp_out_norm = norm(cfg.norm_after)

    def __call__(
        self,
        x: Float[Array, "B N D"],
        table: Table,
        attend: Callable[..., Array],
        rows: NamedSharding | None = None,
        labels: Float[Array, ""] | None = None,
    ):
        cfg = self.cfg
        mlp = functools.partial(self.mlp, rows=rows, labels=labels) if cfg.experts else self.mlp
        if not (cfg.norm_before or cfg.norm_after):
            x = _normed(self.attention_norm, x + self.attention(x, table, attend))
            return _normed(self.mlp_norm, x + mlp(x))

        inputs = _normed(self.attention_norm, x)
        attention = _normed(self.attention_out_norm, self.attention(inputs, table, attend))
        if cfg.parallel_residual:
            mlp_inputs = inputs if cfg.shared_norm else _normed(self.mlp_norm, x)
            return x + self._scaled(attention) + self._scaled(mlp(mlp_inputs))
        x = x + self._scaled(attention)
        return x + self._scaled(_normed(self.mlp_out_norm, mlp(_normed(self.mlp_norm, x))))

    def _scaled(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        return x if self.cfg.residual_scale == 1 else x * self.cfg.residual_scale


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
        if cfg.embed_norm:
            self.embed_norm = NORMS[cfg.norm](cfg.hidden_size, cfg.norm_eps)
        blocks = {str(i): self.block(cfg.layer(i), rngs, fused) for i in range(cfg.num_layers)}
        self.layers = nnx.Dict(blocks)
        if cfg.final_norm:
            self.norm = NORMS[cfg.norm](cfg.hidden_size, cfg.norm_eps)
        if not cfg.tie_embeddings:
            self.head = make_table((cfg.vocab_size, embed_size), ("vocab", "embedding"), rngs)
        if cfg.head_bias:
            self.head_bias = nnx.Param(jnp.zeros((cfg.vocab_size,)), axes=("logits",))

    def inputs(
        self,
        tokens: Int[Array, "B N"],
        positions: Int[Array, "B N"],
        rows: NamedSharding | None = None,
    ):
        """The first block's input ``[B, N, D]``; ``rows`` is the sharding of the tokens."""
        x = self.embedded(tokens, rows)
        if self.cfg.embed_scale is not None:
            # Rounded to the dtype of x first, as in transformers.
            x = x * jnp.asarray(self.cfg.embed_scale, x.dtype)
        if self.cfg.embed_norm:
            x = self.embed_norm(x)
        return x

    def embedded(
        self, tokens: Int[Array, "B N"], rows: NamedSharding | None = None
    ) -> Float[Array, "B N D"]:
        """The tokens' embeddings, not projected."""
        return sharding.look_up_split(self.embed[...], tokens, self.cfg.vocab_size, rows)

    def tables(self, positions: Int[Array, "B N"]) -> list[Table]:
        """Each layer's table; layers of the same kind share one."""
        cfg = self.cfg
        size = cfg.rotary_dim or cfg.head_dim
        rotated = plain = local = Table()
        if cfg.rope is not None:
            rotated = Table(*rope_table(cfg.rope, size, positions, cfg.rope_interleaved))
        if cfg.query_scale is not None:
            plain = Table(query_scale=_query_factors(cfg.query_scale, positions))
        if cfg.rope_layers is None:  # then it is for all layers
            rotated = rotated._replace(query_scale=plain.query_scale)
        if cfg.local_rope is not None:
            local = Table(*rope_table(cfg.local_rope, size, positions, cfg.rope_interleaved))

        tables = []
        for window, rotates in zip(cfg.windows, cfg.rotations, strict=True):
            if not rotates:
                tables.append(plain)
            elif window is not None and cfg.local_rope is not None:
                tables.append(local)
            else:
                tables.append(rotated)
        return tables

    def outputs(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        """The output head's input, from the last block's output."""
        if self.cfg.final_norm:
            x = self.norm(x)
        if self.cfg.logit_scale != 1:
            x = x * self.cfg.logit_scale  # here, so that losses with a head of their own see it
        return x

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
        labels: Float[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B N D"], Float[Array, "B N P D"] | None]:
        """The hidden states, and the inputs of the P ``aux_layers``; None if there are none.

        ``features`` are what a draft head reads beside its tokens. ``rows`` is the sharding of the
        batch's rows, to which every block is constrained. A device then works on its own rows with
        weights gathered for one block, never on a part of each row's hidden size. ``labels`` is for
        the routers of experts.
        """
        x = self.inputs(tokens, positions, rows)
        x = constrain(x, sharding.between_blocks(rows, tokens.shape[1]))
        tables = self.tables(positions)
        aux_states = None
        if aux_layers:
            aux_states = jnp.zeros((*x.shape[:2], len(aux_layers), x.shape[2]), x.dtype)
        first = 0
        if scan:
            x, aux_states, first = self._scan(
                x, aux_states, aux_layers, tables, attend, remat, rows, labels
            )

        # Unrolled for decoding: a scan over stacked layers halves its speed. After a scan only the
        # layers of an incomplete period are left.
        for i in range(first, self.cfg.num_layers):
            aux_states = _record_aux(aux_states, aux_layers, i, x)
            run = _block_runner(tables[i], functools.partial(attend, i), rows, labels)
            if remat:
                run = nnx.remat(run, policy=_remat_policy(remat))
            x = run(self.layers[str(i)], x)
        return constrain(self.outputs(x), rows), aux_states

    def _scan(
        self,
        x: Float[Array, "B N D"],
        aux_states: Float[Array, "B N P D"] | None,
        aux_layers: tuple[int, ...],
        tables: list[Table],
        attend: Attend,
        remat: Remat,
        rows: NamedSharding | None,
        labels: Float[Array, ""] | None,
    ) -> tuple[Float[Array, "B N D"], Float[Array, "B N P D"] | None, int]:
        """Runs layers as one ``lax.scan`` over whole periods; also returns how many layers it ran.

        A period is the shortest sequence of layer kinds that repeats. The program holds one period
        whatever the depth. That costs a stacked copy of the params.
        """
        kinds = [
            (window, id(table), self.cfg.layer(i))
            for i, (window, table) in enumerate(zip(self.cfg.windows, tables, strict=True))
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
                run_block = _block_runner(tables[i], functools.partial(attend, i), rows, labels)
                x = run_block(block, x)
            return (x, aux_states), None

        if remat:
            # `prevent_cse` keeps XLA from merging the recomputation with the forward pass. Across
            # a scan XLA cannot do so anyway, so it is off.
            run = jax.checkpoint(run, prevent_cse=False, policy=_remat_policy(remat))
        periods = (jnp.arange(0, count, repeat), stacked)
        (x, aux_states), _ = jax.lax.scan(run, (x, aux_states), periods)
        return x, aux_states, count


def _query_factors(scale: QueryScale, positions: Int[Array, "B N"]) -> Float[Array, "B N"]:
    """The factors on queries at these positions, float32."""
    steps = jnp.floor((positions + scale.offset) / scale.length)
    return 1 + scale.beta * jnp.log1p(steps.astype(jnp.float32))


def _head_norm(cfg: ModelConfig, heads: int) -> Callable[[Array], Array]:
    """The norm of q or k, by the config's ``qk_norm``."""
    if cfg.qk_norm == "all":
        return AllHeadsRMSNorm(heads * cfg.head_dim, cfg.norm_eps, cfg.shards)
    norm = NORMS[cfg.qk_norm_kind or cfg.norm]
    if cfg.qk_norm == "heads":
        return norm((heads, cfg.head_dim), cfg.norm_eps)
    return norm(cfg.head_dim, cfg.norm_eps, "head")


def _normed(norm: Callable[[Array], Array] | None, x: Float[Array, "B N D"]):
    """``x`` normed, or itself where a block has no such norm."""
    return x if norm is None else norm(x)


def _remat_policy(remat: Remat) -> Callable | None:
    """What ``jax.checkpoint`` keeps of a block beside its input; None: nothing."""
    if remat == "attention":
        return jax.checkpoint_policies.save_only_these_names(RESULT)
    return None


def _block_runner(
    table: Table,
    attend: Callable,
    rows: NamedSharding | None,
    labels: Float[Array, ""] | None,
) -> Callable:
    """``run(block, x)``. It closes over the table and ``attend``, so remat traces neither."""

    def run(block: nnx.Module, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        # Remat keeps a block's input. The first constraint says in the backward pass, too, that a
        # device has its share of the tokens; without it XLA keeps all of them on each device. The
        # third one keeps the last out of the block: there, devices of a model have the same tokens
        # and different columns.
        shared = sharding.between_blocks(rows, x.shape[1])
        x = constrain(constrain(x, shared), rows)
        out = constrain(block(x, table, attend, rows, labels), rows)
        return constrain(out, shared)

    return run


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

    attention = block["attention"]
    if "kv_up" in attention:
        attention = absorb(attention)
    else:
        attention = join(attention, ("q", "k", "v"), "qkv")
    mlp = block["mlp"]
    if "gate" in mlp:
        mlp = join(mlp, ("gate", "up"), "gate_up")
    return block | {"attention": attention, "mlp": mlp}
