"""Optimizers and learning rate schedules, all from optax."""

from __future__ import annotations

import jax
import numpy as np
import optax
from jax.tree_util import tree_map_with_path
from optax.contrib import MuonDimensionNumbers, muon

from train.config import Optim


def schedule(cfg: Optim, peak: float) -> optax.Schedule:
    """The learning rate as a function of the step alone.

    Step 0 is the first. Its rate is ``peak / warmup_steps``, so that no step is lost at rate 0.
    A decay reaches its end at step ``total_steps``, as in optax, PyTorch and transformers: one
    after the last step.

    Args:
      peak: the learning rate after warmup.

    Schedules:
      wsd: warmup-stable-decay (arXiv 2404.06395). Linear warmup, then constant, then linear to
        ``final_fraction`` of the peak over the last ``decay_fraction`` of the steps, but two at
        least. If warmup takes some of those steps, the decay has the rest.
      cosine: linear warmup, then a cosine to ``final_fraction`` of the peak.
    """
    final = peak * cfg.final_fraction
    warmup = cfg.warmup_steps
    ramp = optax.linear_schedule(peak / max(1, warmup), peak, max(1, warmup - 1))
    if cfg.schedule == "cosine":
        after_warmup = max(1, cfg.total_steps - warmup)
        cosine = optax.cosine_decay_schedule(peak, after_warmup, cfg.final_fraction)
        return optax.join_schedules([ramp, cosine], [warmup])

    decay = round(cfg.total_steps * cfg.decay_fraction)
    if cfg.decay_fraction:
        decay = max(2, decay)  # the first step of a decay still has the peak
    start = max(warmup, cfg.total_steps - decay)
    # The decay ends with the steps, also if a long warmup leaves it fewer of them.
    decay = max(1, cfg.total_steps - start)
    phases = [
        ramp,
        optax.constant_schedule(peak),
        optax.linear_schedule(peak, final, decay),
    ]
    return optax.join_schedules(phases, [warmup, start])


def schedule_warning(cfg: Optim) -> str | None:
    """A line for the log if the schedule ends within its warmup; None if it does not."""
    if cfg.warmup_steps < cfg.total_steps or cfg.warmup_steps <= 1:
        return None
    share = cfg.total_steps / cfg.warmup_steps
    return (
        f"optim.warmup_steps={cfg.warmup_steps} leaves no step after warmup: with "
        f"optim.total_steps={cfg.total_steps} the learning rate reaches {share:.0%} of its peak "
        "and does not decay"
    )


def is_matrix(params: dict) -> dict:
    """True where weight decay applies: matrices, not norms or biases."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def muon_axes(params: dict) -> dict:
    """Axes of the matrices inside the blocks, which Muon trains; None for all others (AdamW).

    Weights are ``[out, in]``, so the reduction axis is 1.
    """

    def axes(path, x):
        if path[0].key == "layers" and x.ndim == 2:
            return MuonDimensionNumbers(reduction_axis=1, output_axis=0)
        return None

    return tree_map_with_path(axes, params)


def _muon_labels(params: dict) -> dict:
    """The optimizer of each parameter: "muon" or "adamw"."""
    axes = muon_axes(params)
    return jax.tree.map(
        lambda axis: "adamw" if axis is None else "muon",
        axes,
        is_leaf=lambda axis: axis is None or isinstance(axis, MuonDimensionNumbers),
    )


def _adamw(cfg: Optim) -> optax.GradientTransformation:
    """AdamW with weight decay on matrices."""
    return optax.adamw(
        schedule(cfg, cfg.learning_rate),
        cfg.beta1,
        cfg.beta2,
        cfg.epsilon,
        mu_dtype=cfg.moments,
        weight_decay=cfg.weight_decay,
        mask=is_matrix,
    )


def make_optimizer(cfg: Optim) -> optax.GradientTransformation:
    """Clipping by global norm (``clip_norm`` 0: none), then the optimizer that the config names.

    adamw: for all parameters (arXiv 1711.05101).
    muon: Muon (Jordan et al. 2024) for the matrices inside the blocks, AdamW for the others.
    adafactor: second moments as one row and one column per matrix, no first moments
      (arXiv 1804.04235); learning rate and weight decay as for adamw.

    A step whose gradients are not finite is skipped: params and moments stay as they are.
    """
    if cfg.optimizer == "adamw":
        inner = _adamw(cfg)
    elif cfg.optimizer == "muon":
        matrices = muon(
            schedule(cfg, cfg.muon_learning_rate),
            beta=cfg.muon_momentum,
            weight_decay=cfg.weight_decay,
            mu_dtype=cfg.moments,
            muon_weight_dimension_numbers=muon_axes,
        )
        # optax's muon trains all other parameters with Adam, but without a mask for their decay.
        inner = optax.partition({"muon": matrices, "adamw": _adamw(cfg)}, _muon_labels)
    else:
        inner = optax.chain(
            optax.scale_by_factored_rms(),
            optax.clip_by_block_rms(1.0),
            optax.add_decayed_weights(cfg.weight_decay, is_matrix),
            optax.scale_by_learning_rate(schedule(cfg, cfg.learning_rate)),
        )
    # Both have the same empty state: a resumed run may turn clipping on or off.
    clip = optax.clip_by_global_norm(cfg.clip_norm) if cfg.clip_norm else optax.identity()
    clipped = optax.chain(clip, inner)
    # The loop counts skipped steps in a row, and ends the run. Here there is no limit.
    return optax.apply_if_finite(clipped, max_consecutive_errors=np.iinfo(np.int32).max)
