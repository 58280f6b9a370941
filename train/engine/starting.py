"""The checkpoint that training starts from."""

from __future__ import annotations

from specjax._util.errors import InputError
from specjax.models import ModelConfig
from specjax.models.families.head_config import HeadConfig


def require_model(cfg: ModelConfig, name: str) -> None:
    """Raises InputError if the checkpoint that ``model.init_from`` names is a draft head's."""
    if isinstance(cfg, HeadConfig):
        raise InputError(f"model.init_from={name!r} is a head: name its target")
