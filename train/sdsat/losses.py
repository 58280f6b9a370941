"""SDSAT's losses (arXiv 2403.18647, §2.2), for a batch.

The clean sequence is the text. In the mixed sequence, adaptive tokens replace windows of it.

``basic``: cross-entropy on the mixed sequence alone, all tokens with equal weight.
``improved``: the paper's, on the clean and on the mixed sequence.
``isolated``: ours, on the clean sequence and on windows appended to it that only they can see.

The last two are ½ · (mean over clean tokens + w · mean over adaptive tokens). Equation (9)
multiplies a scalar by a mask and does not say which tokens its second mean counts. Here it counts
the adaptive ones.

Axes: B rows, T tokens, N adaptive tokens of a row, W windows, k tokens of a window, D hidden size,
V vocabulary, n tokens of a chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from specjax.models import ModelConfig, hidden_states
from specjax.models.attention.dense import Isolated
from specjax.models.blocks import Remat
from train.data.packing import IGNORE
from train.engine.averages import Extras
from train.engine.loop import LossFn
from train.engine.losses import (
    OutputHead,
    cast,
    label_count,
    nll,
    row_arguments,
    sum_over_chunks,
    summed_kl,
)


class Streams(NamedTuple):
    """Hidden states of a batch, after the forward pass of one of the losses.

    Attributes:
      clean: at the tokens of the clean sequence.
      adaptive: at the adaptive tokens (N), or at all tokens of the mixed sequence (N = T).
      teacher: at the clean tokens that predict the same labels as ``adaptive``.
    """

    clean: Float[Array, "B T D"]
    adaptive: Float[Array, "B N D"]
    teacher: Float[Array, "B N D"]


@dataclasses.dataclass(frozen=True)
class SdsatObjective:
    """What is minimized.

    Attributes:
      loss: ``basic``, ``improved`` or ``isolated``.
      window: L, the number of places in a window that are logged separately.
      self_share: weight of KL(clean distribution ‖ adaptive distribution), both of the model
        itself; the rest of the adaptive loss is cross-entropy on the data. 0 is the config's
        ``data``, 1 is ``self``, between them is ``mix``.
      weight: w, of the adaptive mean.
      dtype: of the forward pass; params and their gradients keep theirs.
      remat: recompute each block in the backward pass: False, True, or ``attention``.
      scan: compile one block and scan over the layers.
    """

    loss: str
    window: int
    self_share: float = 0.0
    weight: float = 1.0
    dtype: str = "float32"
    remat: Remat = False
    scan: bool = False


def sdsat_loss(
    cfg: ModelConfig, objective: SdsatObjective, rows: NamedSharding | None = None
) -> LossFn:
    """The training loss: a function (params, frozen, batch) -> (sum, token count, extras).

    Its batches are laid out for ``objective.loss`` (:mod:`train.sdsat.insertion`), and have the
    ``ratio`` of :func:`weigh`.

    Args:
      rows: the sharding of a batch's rows; None: on one device.

    Logged with it: ``loss``, of the clean tokens, and ``adaptive_loss`` in nats per token. What is
    minimized is logged as ``objective``. For each place in the
    window: ``adaptive_accuracy`` against the data and, with self targets, ``adaptive_agreement``
    with the argmax of the clean sequence.
    """

    def loss(params, frozen, batch):
        params = cast(params, objective.dtype)
        streams = _forward(cfg, objective, params, batch, rows)
        head = OutputHead.of(cfg, params, rows)
        nats, count, adaptive, extras = _sums(objective, head, streams, batch)
        if objective.loss == "basic":
            return nats + adaptive["loss"], count + adaptive["count"], extras
        # The step divides by the clean count. ``ratio`` is clean over adaptive tokens of the whole
        # step, so it turns the adaptive sum into a mean of its own.
        total = 0.5 * (nats + objective.weight * batch["ratio"] * adaptive["loss"])
        return total, count, extras

    return loss


def weigh(objective: SdsatObjective, batches: dict) -> dict:
    """Adds ``ratio`` float32 ``[accumulate]``: clean tokens per adaptive token of the step."""
    clean, adaptive = split_labels(objective.loss, batches)
    ratio = label_count(clean) / jnp.maximum(label_count(adaptive), 1.0)
    return batches | {"ratio": jnp.broadcast_to(ratio, clean.shape[:1])}


def split_labels(loss: str, batch: dict) -> tuple[Int[Array, "*a T"], Int[Array, "*a N"]]:
    """(labels of the clean mean, labels of the adaptive mean); all other labels are IGNORE."""
    labels = batch["labels"]
    if loss == "isolated":
        tokens = labels.shape[-1] - batch["sources"].shape[-1]
        return labels[..., :tokens], labels[..., tokens:]
    adaptive = jnp.where(batch["index"] > 0, labels, IGNORE)
    if loss == "improved":
        return labels, adaptive
    return jnp.where(batch["index"] > 0, IGNORE, labels), adaptive


def _forward(
    cfg: ModelConfig,
    objective: SdsatObjective,
    params: dict,
    batch: dict,
    rows: NamedSharding | None,
) -> Streams:
    """The forward pass of ``objective.loss``."""
    remat = objective.remat
    scan = objective.scan
    if objective.loss == "isolated":
        return isolated_streams(cfg, params, batch, objective.window, remat, scan, rows)

    labels = label_count(batch["labels"])
    run = functools.partial(
        hidden_states, cfg, params, remat=remat, scan=scan, rows=rows, labels=labels
    )
    if objective.loss == "basic":
        mixed = batch | {"tokens": batch["mixed"]}
        hidden = run(*row_arguments(mixed)).hidden
        return Streams(hidden, hidden, hidden)

    # improved: each row's clean and mixed sequence are neighbors in one batch of 2 B rows, so
    # that they are on the same device.
    pairs = {
        "tokens": jnp.stack([batch["tokens"], batch["mixed"]], 1),
        "positions": jnp.stack([batch["positions"], batch["positions"]], 1),
        "segments": jnp.stack([batch["segments"], batch["segments"]], 1),
    }
    both = {name: x.reshape(-1, x.shape[-1]) for name, x in pairs.items()}
    hidden = run(*row_arguments(both)).hidden
    hidden = hidden.reshape(*pairs["tokens"].shape, -1)
    clean = hidden[:, 0]
    mixed = hidden[:, 1]
    return Streams(clean, mixed, clean)


def isolated_streams(
    cfg: ModelConfig,
    params: dict,
    batch: dict,
    longest: int = 0,
    remat: Remat = False,
    scan: bool = False,
    rows: NamedSharding | None = None,
) -> Streams:
    """The forward pass of the isolated layout: one pass over the clean row and its windows.

    Args:
      batch: rows as :func:`train.sdsat.insertion.append_windows` lays them out.
      longest: the most tokens of a window; 0: not known.
      remat, scan, rows: as :func:`specjax.models.hidden_states` takes them.
    """
    clean_tokens = batch["tokens"].shape[1] - batch["sources"].shape[1]
    hidden = hidden_states(
        cfg,
        params,
        *row_arguments(batch),
        mask_fn=Isolated(clean=clean_tokens, longest=longest),
        meta={"windows": batch["windows"], "starts": batch["starts"]},
        remat=remat,
        scan=scan,
        rows=rows,
        labels=label_count(batch["labels"][:, :clean_tokens]),
    ).hidden
    clean, windows = jnp.split(hidden, [clean_tokens], axis=1)
    teacher = jnp.take_along_axis(clean, batch["sources"][..., None], axis=1)
    return Streams(clean, windows, teacher)


def _sums(
    objective: SdsatObjective, head: OutputHead, streams: Streams, batch: dict
) -> tuple[Array, Array, dict[str, Array], Extras]:
    """(clean nats, clean count, :func:`adaptive_sums`, what is logged)."""
    clean_labels, labels = split_labels(objective.loss, batch)
    # In the isolated layout the adaptive tokens come last; in the others N = T.
    index = batch["index"][:, -labels.shape[1] :]
    nats, count = head.cross_entropy(streams.clean, clean_labels)
    sums = adaptive_sums(objective, head, streams.adaptive, streams.teacher, labels, index)
    extras = {
        "loss": (nats, count),
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
    """Sums over the adaptive tokens.

    Args:
      hidden: of the adaptive tokens.
      teacher: of the clean tokens that predict the same labels, in the same model; no gradient.
        Without self targets nothing reads it, and the compiler drops it.
      labels: the next tokens of the data; IGNORE: not adaptive, or nothing to predict.
      index: the place in the window, from 1.

    Returns:
      ``loss`` in nats and ``count``, scalars. Per place in the window ``[L]``: ``places``, the
      number of tokens; ``hits``, how often the argmax is the label; ``agreed`` (with self
      targets), how often it is the argmax of the teacher.
    """
    share = objective.self_share

    def sums(head, hidden, teacher, index, labels):
        logits = head.logits(hidden)
        real = labels != IGNORE
        places = jax.nn.one_hot(index - 1, objective.window) * real[:, None]
        guess = jnp.argmax(logits, axis=-1)
        out = {
            "loss": (1 - share) * nll(logits, labels),
            "count": jnp.sum(real).astype(jnp.float32),
            "places": places.sum(0),
            "hits": ((guess == labels)[:, None] * places).sum(0),
        }
        if share:
            teacher_logits = jax.lax.stop_gradient(head.logits(teacher))
            same = guess == jnp.argmax(teacher_logits, axis=-1)
            out["loss"] += share * summed_kl(teacher_logits, logits, labels)
            out["agreed"] = (same[:, None] * places).sum(0)
        return out

    # Self-distillation must not pull the clean distribution towards the adaptive one.
    inputs = (hidden, jax.lax.stop_gradient(teacher), index)
    return sum_over_chunks(sums, head, inputs, labels, rows=head.rows)


def probe_loss(
    cfg: ModelConfig, length: int, dtype: str = "float32", rows: NamedSharding | None = None
) -> LossFn:
    """The held-out loss: the clean loss, and how well windows of ``length`` tokens draft.

    Its batches are laid out by :func:`train.sdsat.insertion.probe_row`.

    Extras, besides those of the training loss but ``loss``:
      ``acceptance`` ``[length]``: the share of windows whose places 1..i all agree with the argmax
        of the clean sequence.
      ``accepted``: the mean number of such places.
      ``adaptive_loss``: here against the data.

    The clean argmax is taken along the data, not along the model's own continuation. So these
    figures only approximate the acceptance rate of greedy decoding.
    """

    def loss(params, frozen, batch):
        params = cast(params, dtype)
        streams = isolated_streams(cfg, params, batch, length, rows=rows)
        head = OutputHead.of(cfg, params, rows)
        objective = SdsatObjective("isolated", length, self_share=1.0)
        total, count, _, extras = _sums(objective, head, streams, batch)
        del extras["loss"]  # it is the held-out loss itself

        agree = head.argmax(streams.adaptive) == head.argmax(streams.teacher)
        labels = split_labels("isolated", batch)[1]
        by_window = (len(labels), -1, length)  # [B, W, length]
        # Windows that are cut off do not count.
        complete = (labels != IGNORE).reshape(by_window).all(-1).astype(jnp.float32)
        accepted = jnp.cumprod(agree.reshape(by_window), axis=-1) * complete[..., None]
        windows = complete.sum()
        extras |= {
            "adaptive_loss": head.cross_entropy(streams.adaptive, labels),
            "acceptance": (accepted.sum((0, 1)), jnp.broadcast_to(windows, (length,))),
            "accepted": (accepted.sum(), windows),
        }
        return total, count, extras

    return loss
