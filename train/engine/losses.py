"""Losses over the vocabulary that never hold the logits of a whole batch.

Logits exist for ``chunk`` tokens at a time and are recomputed in the backward pass. The loss mask
is in the labels: a token whose label is IGNORE does not count.

On a mesh that splits models, a device has a share of the table and of the logits. The compiler
then adds up what a sum over the vocabulary needs.

Axes: B rows, T tokens, D hidden size, E a teacher's hidden size, V vocabulary, U that of a teacher,
n tokens of a chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from specjax.models import ModelConfig, head_matrix
from specjax.models.attention.dense import MASKED_SCORE
from specjax.models.sharding import (
    AXIS,
    FSDP,
    axes_of,
    fsdp_axis,
    gather_shares,
    model_devices,
    share_spec,
    split_vocabulary,
)
from train.data.packing import IGNORE

CHUNK = 2048  # tokens per device whose logits exist at the same time
HEAD = "head"  # the name scope of a chunk's operations in a compiled program


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["table", "bias"],
    meta_fields=["softcap", "rows", "padding"],
)
@dataclasses.dataclass(frozen=True)
class OutputHead:
    """The output layer of a model: hidden states to logits.

    Attributes:
      table: the output embedding. Its last rows may be padding, so that devices can share it.
      bias: on the logits; None: there is none.
      softcap: logits are capped at ± this value; None: not capped.
      rows: the sharding of a batch's rows; None: on one device.
      padding: the rows that pad the table; their logits are :data:`MASKED_SCORE`.
    """

    table: Float[Array, "V D"]
    softcap: float | None = None
    rows: NamedSharding | None = None
    bias: Float[Array, "V"] | None = None
    padding: int = 0

    @classmethod
    def of(
        cls,
        cfg: ModelConfig,
        params: dict,
        rows: NamedSharding | None = None,
        ids: slice | np.ndarray | None = None,
    ) -> OutputHead:
        """The output layer of a model with these params, restricted to ``ids`` if they are given.

        If the mesh of ``rows`` splits models, the table is split by vocabulary.
        """
        table = head_matrix(cfg, params)
        bias = params.get("head_bias")
        if ids is not None:
            table = table[ids]
            bias = None if bias is None else bias[ids]
        padding = -table.shape[0] % model_devices(rows)
        table = split_vocabulary(table, rows)
        if bias is not None:
            bias = split_vocabulary(bias, rows)
        return cls(table, cfg.logit_softcap, rows, bias, padding)

    def logits(self, hidden: Float[Array, "n D"]) -> Float[Array, "n V"]:
        """float32 logits, whatever dtype the hidden states have."""
        out = jnp.einsum("nd,vd->nv", hidden, self.table, preferred_element_type=jnp.float32)
        if self.bias is not None:
            out = out + self.bias
        if self.softcap is not None:
            out = self.softcap * jnp.tanh(out / self.softcap)
        if not self.padding:
            return out
        is_padding = jnp.arange(out.shape[-1]) >= out.shape[-1] - self.padding
        return jnp.where(is_padding, MASKED_SCORE, out)

    def cross_entropy(
        self, hidden: Float[Array, "B T D"], labels: Int[Array, "B T"], chunk: int = CHUNK
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Summed negative log-likelihood in nats, and the number of labels that are not IGNORE."""

        def sums(head, hidden, labels):
            return nll(head.logits(hidden), labels)

        total = sum_over_chunks(sums, self, (hidden,), labels, chunk, self.rows)
        return total, label_count(labels)

    def argmax(self, hidden: Float[Array, "B T D"]) -> Int[Array, "B T"]:
        """The most probable next token at each place; a device holds the logits of one row."""

        def argmax_of_rows(head, hidden):
            return jax.lax.map(lambda row: jnp.argmax(head.logits(row), axis=-1), hidden)

        return on_own_rows(argmax_of_rows, self.rows, joined=True)(self, hidden)


def chunked_distillation(
    student: OutputHead,
    hidden: Float[Array, "B T D"],
    teacher: OutputHead,
    teacher_hidden: Float[Array, "B T E"],
    labels: Int[Array, "B T"],
    alpha: float = 1.0,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Summed ``alpha · KL(teacher ‖ student) + (1 − alpha) · NLL`` in nats, token count, NLL alone.

    The KL is taken at ``temperature`` τ and multiplied by τ² (Hinton et al. 2015, §2), so that
    the size of its gradient does not depend on τ. The teacher gets no gradient.
    """

    def loss(heads, hidden, teacher_hidden, labels):
        student, teacher = heads
        student_logits = student.logits(hidden)
        teacher_logits = jax.lax.stop_gradient(teacher.logits(teacher_hidden))
        kl = summed_kl(teacher_logits, student_logits, labels, temperature)
        on_data = nll(student_logits, labels)
        return alpha * kl + (1 - alpha) * on_data, on_data

    total, on_data = sum_over_chunks(
        loss, (student, teacher), (hidden, teacher_hidden), labels, chunk, student.rows
    )
    return total, label_count(labels), jax.lax.stop_gradient(on_data)


def row_arguments(batch: dict) -> tuple[Array, Array, Array]:
    """(tokens, positions, segments) of a batch, the arguments of ``hidden_states``."""
    return batch["tokens"], batch["positions"], batch["segments"]


def nll(logits: Float[Array, "n V"], labels: Int[Array, "n"]) -> Float[Array, ""]:
    """Summed negative log-likelihood, in nats, of the labels that are not IGNORE."""
    real = labels != IGNORE
    # IGNORE is no valid index: masked tokens read id 0, and count zero times.
    at_label = jnp.take_along_axis(logits, jnp.where(real, labels, 0)[:, None], axis=-1)[:, 0]
    return jnp.sum((jax.nn.logsumexp(logits, axis=-1) - at_label) * real)


def summed_kl(
    teacher: Float[Array, "n U"],
    student: Float[Array, "n V"],
    labels: Int[Array, "n"],
    temperature: float = 1.0,
) -> Float[Array, ""]:
    """Summed τ² · KL(teacher ‖ student) in nats, over the tokens whose label is not IGNORE.

    Both distributions are the softmax of logits / τ; τ is ``temperature``. U ≤ V: the teacher gives
    the student's further ids no probability.
    """
    log_p = jax.nn.log_softmax(teacher / temperature)
    log_q = jax.nn.log_softmax(student / temperature)[:, : teacher.shape[-1]]
    kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1) * temperature**2
    return jnp.sum(kl * (labels != IGNORE))


def label_count(labels: Int[Array, "..."]) -> Float[Array, ""]:
    """The number of labels that are not IGNORE, as a float32."""
    return jnp.sum(labels != IGNORE).astype(jnp.float32)


def sum_over_chunks(
    sums: Callable[..., Any],
    shared: Any,
    inputs: tuple[Array, ...],
    labels: Int[Array, "B T"],
    chunk: int = CHUNK,
    rows: NamedSharding | None = None,
) -> Any:
    """``sums(shared, *inputs, labels)`` over chunks of tokens, added up.

    Args:
      sums: takes ``[n, ...]`` of each input and ``[n]`` labels; returns any tree of float32
        sums. It is recomputed in the backward pass. Padding has label IGNORE and zeros.
      shared: any tree that every chunk reads. Each device holds it whole, or its share along
        ``model``. Its gradient is summed over devices a single time, however many chunks there are.
      inputs: ``[B, T, ...]`` each.
      chunk: tokens of a device in each call of ``sums``.
      rows: the sharding of ``[B, T]``; None: on one device.
    """
    of_device = functools.partial(_sum_over_chunks_of_device, sums, chunk)
    return on_own_rows(of_device, rows)(shared, inputs, labels)


def on_own_rows(function: Callable, rows: NamedSharding | None, joined: bool = False) -> Callable:
    """``function`` as run by every device on its own tokens, with the first argument whole.

    Its other arguments are ``[B, T, ...]``. The results are summed over devices, or with ``joined``
    put together as ``[B, T]``. Devices that share a model run it together, on the same tokens.
    """
    if rows is None or rows.mesh.size == model_devices(rows):
        return function  # all rows are on one device, or shared by all
    axes = axes_of(rows)
    own_rows = PartitionSpec(*rows.spec)
    # Along `model` the compiler splits what it can. It would undo that around an explicit gather,
    # so there it also gathers the shares along `fsdp`.
    fsdp = rows.mesh.shape[FSDP] if model_devices(rows) == 1 else 1

    # shard_map, so that a chunk has rows of one device only and no activation moves.
    def on_all_devices(shared, *arrays):
        leaves, tree = jax.tree.flatten(shared)
        gathered = [fsdp_axis(x.shape, fsdp) for x in leaves]

        def on_device(shares, *arrays):
            whole = map(gather_shares, shares, gathered)
            out = function(tree.unflatten(whole), *arrays)
            return out if joined else jax.lax.psum(out, axes)

        mapped = jax.shard_map(
            on_device,
            mesh=rows.mesh,
            in_specs=([share_spec(axis) for axis in gathered], *[own_rows] * len(arrays)),
            out_specs=own_rows if joined else PartitionSpec(),
            axis_names=set(rows.mesh.axis_names) - {AXIS},
        )
        return mapped(leaves, *arrays)

    return on_all_devices


def _sum_over_chunks_of_device(
    sums: Callable, chunk: int, shared: Any, inputs: tuple[Array, ...], labels: Array
) -> Any:
    count = labels.size
    chunk = min(chunk, count)
    pad = -count % chunk

    def split(x, fill):
        """``[chunks, chunk, ...]`` of ``[B, T, ...]``."""
        x = x.reshape(count, *x.shape[2:])
        x = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
        return x.reshape(-1, chunk, *x.shape[1:])

    chunks = (*(split(x, 0) for x in inputs), split(labels, IGNORE))
    # Without checkpoint the backward pass would keep the logits of every chunk.
    sums = jax.checkpoint(jax.named_scope(HEAD)(sums))
    each = jax.lax.map(lambda arrays: sums(shared, *arrays), chunks)
    return jax.tree.map(lambda x: x.sum(axis=0), each)


def cast(params: dict, dtype: str) -> dict:
    """The params in the dtype of the forward pass."""
    return jax.tree.map(lambda x: x.astype(dtype), params)
