"""SDSAT's losses (ALGORITHMS.md §12; paper §2.2, Appendix A), as functions of a batch.

``basic`` trains on the mixed sequence alone; ``improved`` (the paper's) on the clean and the
mixed one; ``isolated`` (ours) on the clean one and windows behind it that nothing else sees.
The last two are ½ (mean over clean tokens + w · mean over adaptive tokens); equation (9)
multiplies a scalar by a mask and does not say over what its second mean runs.

Axes: B rows, T tokens, A appended slots, W windows, k tokens of one, D hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from specjax.models import ModelConfig
from specjax.models.attention.dense import Isolated
from specjax.models.blocks import Remat
from train.data.packing import IGNORE
from train.engine.loop import Extras, LossFn
from train.engine.losses import (
    OutputHead,
    cast,
    hidden_of,
    label_count,
    nll,
    sum_over_chunks,
    summed_kl,
)

# Hidden states of (the clean stream [B, T, D], the adaptive tokens [B, N, D], and the clean
# stream where it predicts the same label as each of those [B, N, D]).
Streams = tuple[Array, Array, Array]


@dataclasses.dataclass(frozen=True)
class SdsatObjective:
    """What is minimised.

    Attributes:
      loss: ``basic``, ``improved`` or ``isolated``.
      window: L, the adaptive places that are logged apart.
      self_share: weight of KL(own clean distribution ‖ adaptive one); the rest of the adaptive
        loss is cross-entropy on the data. 0: ``data``; 1: ``self``; between: ``mix``.
      weight: w, of the adaptive mean.
      dtype: the forward pass's; params and their gradients stay as they are.
      remat: recompute each block in the backward pass: False, True, or ``attention``.
      scan: compile one block and scan the layers.
    """

    loss: str
    window: int
    self_share: float = 0.0
    weight: float = 1.0
    dtype: str = "float32"
    remat: Remat = False
    scan: bool = False

    @property
    def passes(self) -> dict[str, Remat]:
        """How :func:`specjax.models.hidden_states` runs its blocks."""
        return {"remat": self.remat, "scan": self.scan}


def sdsat_loss(
    cfg: ModelConfig, objective: SdsatObjective, rows: NamedSharding | None = None
) -> LossFn:
    """The training loss; its batches are :func:`weigh`-ed and laid out for ``objective.loss``.

    ``rows``: where those of a batch lie, on several devices.

    Logged beside it: ``clean_loss`` and ``adaptive_loss`` in nats per token, and per place in
    the window ``adaptive_accuracy`` against the data and, with self targets,
    ``adaptive_agreement`` with the clean argmax.
    """
    isolated = functools.partial(isolated_streams, longest=objective.window)
    streams = {"basic": _mixed, "improved": _clean_and_mixed, "isolated": isolated}

    def loss(params, frozen, batch):
        params = cast(params, objective.dtype)
        hidden = streams[objective.loss](cfg, params, batch, **objective.passes, rows=rows)
        head = OutputHead.of(cfg, params, rows)
        nats, count, adaptive, extras = _sums(objective, head, hidden, batch)
        if objective.loss == "basic":  # every token of the mixed sequence alike
            return nats + adaptive["loss"], count + adaptive["count"], extras
        # The two means, times the clean count that the step divides by.
        total = 0.5 * (nats + objective.weight * batch["ratio"] * adaptive["loss"])
        return total, count, extras

    return loss


def weigh(objective: SdsatObjective, batches: dict) -> dict:
    """Adds ``ratio`` float32 ``[accumulate]``: clean tokens per adaptive token of the step."""
    clean, adaptive = split_labels(objective.loss, batches)
    ratio = label_count(clean) / jnp.maximum(label_count(adaptive), 1.0)
    return batches | {"ratio": jnp.broadcast_to(ratio, clean.shape[:1])}


def split_labels(loss: str, batch: dict) -> tuple[Int[Array, "*a T"], Int[Array, "*a N"]]:
    """(labels of the clean mean, labels of the adaptive mean): the rest of either is IGNORE."""
    labels = batch["labels"]
    if loss == "isolated":
        tokens = labels.shape[-1] - batch["sources"].shape[-1]
        return labels[..., :tokens], labels[..., tokens:]
    adaptive = jnp.where(batch["index"] > 0, labels, IGNORE)
    if loss == "improved":
        return labels, adaptive
    return jnp.where(batch["index"] > 0, IGNORE, labels), adaptive


def _mixed(cfg: ModelConfig, params: dict, batch: dict, **how: Any) -> Streams:
    """The mixed sequence alone, which is clean and adaptive by turns."""
    hidden = hidden_of(cfg, params, batch | {"tokens": batch["mixed"]}, **how)
    return hidden, hidden, hidden


def _clean_and_mixed(cfg: ModelConfig, params: dict, batch: dict, **how: Any) -> Streams:
    """The clean and the mixed sequence, as rows of one batch, side by side on one device."""
    twice = {"tokens": "mixed", "positions": "positions", "segments": "segments"}
    pairs = {name: jnp.stack([batch[name], batch[other]], 1) for name, other in twice.items()}
    both = {name: x.reshape(-1, x.shape[-1]) for name, x in pairs.items()}
    hidden = hidden_of(cfg, params, both, **how).reshape(*pairs["tokens"].shape, -1)
    clean, mixed = hidden[:, 0], hidden[:, 1]
    return clean, mixed, clean


def isolated_streams(
    cfg: ModelConfig, params: dict, batch: dict, longest: int = 0, **how: Any
) -> Streams:
    """The clean sequence once, and the windows that only they themselves see.

    The rows are laid out by ``append_windows``, whose windows have ``longest`` tokens at most, if
    that is known; ``how`` as :meth:`SdsatObjective.passes`.
    """
    meta = {name: batch[name] for name in ("windows", "starts")}
    count = batch["tokens"].shape[1] - batch["sources"].shape[1]
    mask = Isolated(clean=count, longest=longest)
    hidden = hidden_of(cfg, params, batch, mask_fn=mask, meta=meta, **how)
    clean, windows = jnp.split(hidden, [count], axis=1)
    return clean, windows, jnp.take_along_axis(clean, batch["sources"][..., None], axis=1)


def _sums(
    objective: SdsatObjective, head: OutputHead, streams: Streams, batch: dict
) -> tuple[Array, Array, dict[str, Array], Extras]:
    """(clean nats, clean count, :func:`adaptive_sums`, what is logged)."""
    clean, adaptive, own = streams
    clean_labels, labels = split_labels(objective.loss, batch)
    index = batch["index"][:, -labels.shape[1] :]
    nats, count = head.cross_entropy(clean, clean_labels)
    sums = adaptive_sums(objective, head, adaptive, own, labels, index)
    extras = {
        "clean_loss": (nats, count),
        "adaptive_loss": (sums["loss"], sums["count"]),
        "adaptive_accuracy": (sums["hits"], sums["places"]),
    }
    if "agreed" in sums:
        extras["adaptive_agreement"] = (sums["agreed"], sums["places"])
    return nats, count, sums, jax.lax.stop_gradient(extras)


def adaptive_sums(
    objective: SdsatObjective,
    head: OutputHead,
    hidden: Float[Array, "B N D"],
    teacher: Float[Array, "B N D"],
    labels: Int[Array, "B N"],
    index: Int[Array, "B N"],
) -> dict[str, Array]:
    """Sums over adaptive tokens: the loss, the count, and per place the hits.

    ``teacher`` are hidden states of the same model that get no gradient; they are unread, and
    dropped by the compiler, where the objective has no self targets.
    """
    share = objective.self_share

    def sums(head, hidden, teacher, index, labels):
        student, real = head.logits(hidden), labels != IGNORE
        places = jax.nn.one_hot(index - 1, objective.window) * real[:, None]
        guess = jnp.argmax(student, axis=-1)
        out = {
            "loss": (1 - share) * nll(student, labels),
            "count": jnp.sum(real).astype(jnp.float32),
            "places": places.sum(0),
            "hits": ((guess == labels)[:, None] * places).sum(0),
        }
        if share:
            own = jax.lax.stop_gradient(head.logits(teacher))
            out["loss"] += share * summed_kl(own, student, labels)
            out["agreed"] = ((guess == jnp.argmax(own, axis=-1))[:, None] * places).sum(0)
        return out

    inputs = (hidden, jax.lax.stop_gradient(teacher), index)
    return sum_over_chunks(sums, head, inputs, labels, rows=head.rows)


def probe_loss(
    cfg: ModelConfig, length: int, dtype: str = "float32", rows: NamedSharding | None = None
) -> LossFn:
    """The clean loss, and how well windows of ``length`` draft, on ``probe_row`` batches.

    Extras beside the training loss's: ``acceptance`` ``[length]``, the share of windows whose
    places 1..i all agree with the clean argmax; ``accepted``, the mean number of those places;
    ``adaptive_loss`` is against the data. The clean argmax is taken along the data, not along
    the model's own continuation: the figures stand in for greedy decoding's.
    """

    def loss(params, frozen, batch):
        params = cast(params, dtype)
        streams = isolated_streams(cfg, params, batch, length, rows=rows)
        head = OutputHead.of(cfg, params, rows)
        objective = SdsatObjective("isolated", length, self_share=1.0)
        total, count, _, extras = _sums(objective, head, streams, batch)
        _, windows, own = streams
        agree = head.argmax(windows) == head.argmax(own)
        labels = split_labels("isolated", batch)[1]
        # Of each window, 0 or 1: whether all of it is there, and whether places 1..i all agree.
        windowed = (len(labels), -1, length)
        whole = (labels != IGNORE).reshape(windowed).all(-1).astype(jnp.float32)
        run = jnp.cumprod(agree.reshape(windowed), axis=-1) * whole[..., None]
        extras |= {
            "adaptive_loss": head.cross_entropy(windows, labels),
            "acceptance": (run.sum((0, 1)), jnp.broadcast_to(whole.sum(), (length,))),
            "accepted": (run.sum(), whole.sum()),
        }
        return total, count, extras

    return loss
