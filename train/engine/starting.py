"""The checkpoint that training starts from."""

from __future__ import annotations

import dataclasses

from specjax._util.errors import InputError
from specjax.models import ModelConfig
from specjax.models.families.head_config import HeadConfig


def require_model(cfg: ModelConfig, name: str) -> None:
    """Raises InputError if the checkpoint that ``model.init_from`` names is a draft head's."""
    if isinstance(cfg, HeadConfig):
        raise InputError(f"model.init_from={name!r} is a head: name its target")


def with_router_loss(cfg: ModelConfig, weight: float) -> ModelConfig:
    """The config by which training adds the routers' balancing loss.

    Args:
      weight: of the mean over the layers that have experts; 0: it is not added.

    Raises:
      InputError: there is a weight, and the model has no experts.
    """
    if not weight:
        return cfg
    if cfg.experts is None:
        raise InputError(
            f"model.router_aux_loss={weight:g}: {cfg.family} has no experts to balance; "
            "leave it out"
        )
    layers = cfg.num_layers if cfg.expert_layers is None else sum(cfg.expert_layers)
    experts = dataclasses.replace(cfg.experts, balance=weight / layers)
    return dataclasses.replace(cfg, experts=experts)
