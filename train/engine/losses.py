"""Losses over the vocabulary that never hold the logits of a whole batch.

Logits exist for ``chunk`` tokens at a time and are recomputed in the backward pass.
Axis legend: B rows, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from specjax.models import ModelConfig, head_matrix, hidden_states
from train.data.packing import IGNORE

CHUNK = 2048
HEAD = "head"  # the name of what a chunk runs in a compiled program


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=["softcap", "rows"]
)
@dataclasses.dataclass(frozen=True)
class OutputHead:
    """The output table ``[V, D]``, what the model does to its logits, and where rows lie."""

    table: Float[Array, "V D"]
    softcap: float | None = None
    rows: NamedSharding | None = None

    @classmethod
    def of(cls, cfg: ModelConfig, params: dict, rows: NamedSharding | None = None) -> OutputHead:
        return cls(head_matrix(cfg, params), cfg.logit_softcap, rows)

    def logits(self, hidden: Float[Array, "n D"]) -> Float[Array, "n V"]:
        """float32, whatever dtype the hidden states have; capped where the model does."""
        out = jnp.einsum("nd,vd->nv", hidden, self.table, preferred_element_type=jnp.float32)
        return out if self.softcap is None else self.softcap * jnp.tanh(out / self.softcap)

    def cross_entropy(
        self, hidden: Float[Array, "B T D"], labels: Int[Array, "B T"], chunk: int = CHUNK
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Summed negative log-likelihood in nats, and the number of labels that are not IGNORE."""

        def sums(head, hidden, labels):
            return nll(head.logits(hidden), labels)

        total = sum_over_chunks(sums, self, (hidden,), labels, chunk, self.rows)
        return total, label_count(labels)

    def argmax(self, hidden: Float[Array, "B T D"]) -> Int[Array, "B T"]:
        """The most probable token after each; a device's logits are of one row at a time."""

        def own(head, hidden):
            return jax.lax.map(lambda row: jnp.argmax(head.logits(row), axis=-1), hidden)

        return on_own_rows(own, self.rows, joined=True)(self, hidden)


def chunked_distillation(
    student: OutputHead,
    hidden: Float[Array, "B T D"],
    teacher: OutputHead,
    teacher_hidden: Float[Array, "B T E"],
    labels: Int[Array, "B T"],
    alpha: float = 1.0,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Summed ``alpha · KL(teacher ‖ student) + (1 − alpha) · NLL``, and the token count.

    The KL is taken at ``temperature`` and scaled by its square (Hinton et al. 2015, §2), so
    that its gradient keeps its size. The teacher gets no gradient.
    """

    def loss(heads, hidden, teacher_hidden, labels):
        own, other = heads[0].logits(hidden), heads[1].logits(teacher_hidden)
        kl = summed_kl(jax.lax.stop_gradient(other), own, labels, temperature)
        return alpha * kl + (1 - alpha) * nll(own, labels)

    heads, inputs = (student, teacher), (hidden, teacher_hidden)
    total = sum_over_chunks(loss, heads, inputs, labels, chunk, student.rows)
    return total, label_count(labels)


def hidden_of(cfg: ModelConfig, params: dict, batch: dict, **how: Any) -> Float[Array, "B T D"]:
    """Hidden states of a batch's rows; ``how`` as :func:`specjax.models.hidden_states` takes it."""
    rows = (batch[name] for name in ("tokens", "positions", "segments"))
    return hidden_states(cfg, params, *rows, **how).hidden


def nll(logits: Float[Array, "n V"], labels: Int[Array, "n"]) -> Float[Array, ""]:
    """Summed negative log-likelihood of the labels that are not IGNORE."""
    real = labels != IGNORE
    at = jnp.take_along_axis(logits, jnp.where(real, labels, 0)[:, None], axis=-1)[:, 0]
    return jnp.sum((jax.nn.logsumexp(logits, axis=-1) - at) * real)


def summed_kl(
    teacher: Float[Array, "n V"],
    student: Float[Array, "n V"],
    labels: Int[Array, "n"],
    temperature: float = 1.0,
) -> Float[Array, ""]:
    """Summed KL(teacher ‖ student) of logits, where the label is not IGNORE."""
    log_p = jax.nn.log_softmax(teacher / temperature)
    log_q = jax.nn.log_softmax(student / temperature)
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
    """``sums(shared, *inputs, labels)`` for ``chunk`` tokens of a device at a time, added up.

    Args:
      sums: takes ``[n, ...]`` of each input and ``[n]`` labels; returns any tree of float32
        sums. It is recomputed in the backward pass. Padding has label IGNORE and zeros.
      shared: any tree that every chunk reads. A device takes it whole, and sums its gradient,
        once, however many chunks there are.
      inputs: ``[B, T, ...]`` each.
      rows: where these B rows lie; None: on one device.
    """
    own = functools.partial(_sum_over_chunks, sums, chunk)
    return on_own_rows(own, rows)(shared, inputs, labels)


def on_own_rows(function: Callable, rows: NamedSharding | None, joined: bool = False) -> Callable:
    """``function`` run by every device on its rows, with its first argument whole.

    The results are summed, or ``joined`` again as rows.
    """
    if rows is None:
        return function
    axes, split, whole = rows.spec[0], PartitionSpec(rows.spec[0]), PartitionSpec()

    def spread(shared, *own):
        out = function(shared, *own)
        return out if joined else jax.lax.psum(out, axes)

    def called(shared, *own):
        specs = (whole, *[split] * len(own))
        out = split if joined else whole
        return jax.shard_map(spread, mesh=rows.mesh, in_specs=specs, out_specs=out)(shared, *own)

    return called


def _sum_over_chunks(
    sums: Callable, chunk: int, shared: Any, inputs: tuple[Array, ...], labels: Array
) -> Any:
    count = labels.size
    chunk = min(chunk, count)
    pad = -count % chunk

    def split(x, fill):
        x = x.reshape(count, *x.shape[2:])
        x = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
        return x.reshape(-1, chunk, *x.shape[1:])

    parts = (*(split(x, 0) for x in inputs), split(labels, IGNORE))
    sums = jax.checkpoint(jax.named_scope(HEAD)(sums))
    each = jax.lax.map(lambda part: sums(shared, *part), parts)
    return jax.tree.map(lambda x: x.sum(axis=0), each)


def cast(params: dict, dtype: str) -> dict:
    """The params as the forward pass has them."""
    return jax.tree.map(lambda x: x.astype(dtype), params)
