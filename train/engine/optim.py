"""Optimizers and learning rate schedules, all from optax."""

from __future__ import annotations

import jax
import optax
from jax.tree_util import tree_map_with_path
from optax.contrib import MuonDimensionNumbers, muon

from train.config import Optim


def schedule(cfg: Optim, peak: float) -> optax.Schedule:
    """The learning rate as a function of the step alone.

    Args:
      peak: the learning rate after warmup.

    Schedules:
      wsd: warmup-stable-decay (arXiv 2404.06395). Linear warmup, then constant, then linear to
        ``final_fraction`` of the peak over the last ``decay_fraction`` of the steps.
      cosine: linear warmup, then a cosine to ``final_fraction`` of the peak.
    """
    final = peak * cfg.final_fraction
    if cfg.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            0.0, peak, cfg.warmup_steps, max(cfg.total_steps, cfg.warmup_steps + 1), final
        )
    decay = max(1, round(cfg.total_steps * cfg.decay_fraction))
    start = max(cfg.warmup_steps, cfg.total_steps - decay)
    phases = [
        optax.linear_schedule(0.0, peak, max(1, cfg.warmup_steps)),
        optax.constant_schedule(peak),
        optax.linear_schedule(peak, final, decay),
    ]
    return optax.join_schedules(phases, [cfg.warmup_steps, start])


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


def make_optimizer(cfg: Optim) -> optax.GradientTransformation:
    """Clipping by global norm, then the optimizer that the config names.

    adamw: for all parameters (arXiv 1711.05101).
    muon: Muon (Jordan et al. 2024) for the matrices inside the blocks, AdamW for the others.
    adafactor: second moments as one row and one column per matrix, no first moments
      (arXiv 1804.04235); learning rate and weight decay as for adamw.
    """
    rate = schedule(cfg, cfg.learning_rate)
    if cfg.optimizer == "adamw":
        inner = optax.adamw(
            rate,
            cfg.beta1,
            cfg.beta2,
            mu_dtype=cfg.moments,
            weight_decay=cfg.weight_decay,
            mask=is_matrix,
        )
    elif cfg.optimizer == "muon":
        inner = muon(
            schedule(cfg, cfg.muon_learning_rate),
            weight_decay=cfg.weight_decay,
            mu_dtype=cfg.moments,
            adam_b1=cfg.beta1,
            adam_b2=cfg.beta2,
            adam_learning_rate=rate,
            muon_weight_dimension_numbers=muon_axes,
        )
    else:
        inner = optax.chain(
            optax.scale_by_factored_rms(),
            optax.clip_by_block_rms(1.0),
            optax.add_decayed_weights(cfg.weight_decay, is_matrix),
            optax.scale_by_learning_rate(rate),
        )
    return optax.chain(optax.clip_by_global_norm(cfg.clip_norm), inner)
