"""Losses over the vocabulary that never hold the logits of a whole batch.

Logits exist for ``chunk`` tokens at a time and are recomputed in the backward pass.
Axis legend: B rows, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from train.data import IGNORE

CHUNK = 2048


def chunked_cross_entropy(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "B T"],
    chunk: int = CHUNK,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Summed negative log-likelihood in nats, and the number of labels that are not IGNORE."""

    def loss(hidden, labels):
        return _nll(_logits(hidden, head), labels)

    return _over_chunks(loss, (hidden,), labels, chunk)


def chunked_distillation(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    teacher_hidden: Float[Array, "B T E"],
    teacher_head: Float[Array, "V E"],
    labels: Int[Array, "B T"],
    alpha: float = 1.0,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Summed ``alpha · KL(teacher ‖ student) + (1 − alpha) · NLL``, and the token count.

    The KL is taken at ``temperature`` and scaled by its square (Hinton et al. 2015, §2), so
    that its gradient keeps its size. The teacher gets no gradient.
    """

    def loss(hidden, teacher_hidden, labels):
        logits = _logits(hidden, head)
        teacher = jax.lax.stop_gradient(_logits(teacher_hidden, teacher_head))
        log_p = jax.nn.log_softmax(teacher / temperature)
        log_q = jax.nn.log_softmax(logits / temperature)
        kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1) * temperature**2
        real = labels != IGNORE
        return alpha * jnp.sum(kl * real) + (1 - alpha) * _nll(logits, labels)

    return _over_chunks(loss, (hidden, teacher_hidden), labels, chunk)


def _logits(hidden: Float[Array, "n D"], head: Float[Array, "V D"]) -> Float[Array, "n V"]:
    return jnp.einsum("nd,vd->nv", hidden, head, preferred_element_type=jnp.float32)


def _nll(logits: Float[Array, "n V"], labels: Int[Array, "n"]) -> Float[Array, ""]:
    real = labels != IGNORE
    at = jnp.take_along_axis(logits, jnp.where(real, labels, 0)[:, None], axis=-1)[:, 0]
    return jnp.sum((jax.nn.logsumexp(logits, axis=-1) - at) * real)


def _over_chunks(
    loss: Callable[..., Float[Array, ""]],
    inputs: tuple[Float[Array, "B T _"], ...],
    labels: Int[Array, "B T"],
    chunk: int,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    count = labels.size
    chunk = min(chunk, count)
    pad = -count % chunk

    def split(x, fill):
        x = x.reshape(count, *x.shape[2:])
        x = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
        return x.reshape(-1, chunk, *x.shape[1:])

    parts = (*(split(x, 0) for x in inputs), split(labels, IGNORE))

    def add(total, part):
        return total + jax.checkpoint(loss)(*part), None

    total, _ = jax.lax.scan(add, jnp.float32(0), parts)
    return total, jnp.sum(labels != IGNORE).astype(jnp.float32)
