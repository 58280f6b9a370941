"""The configs of the training programs: sections, how they are read, what a resume may change."""

from train.config.reading import from_dict, from_toml, read_toml, to_dict
from train.config.resuming import MAY_CHANGE, fixed_settings, require_same
from train.config.sections import (
    Adaptive,
    DataSection,
    Distill,
    HeadRunConfig,
    HeadSection,
    HeadTarget,
    LMConfig,
    MeshSection,
    Model,
    Optim,
    Run,
    SDSATConfig,
    TokenizerSection,
    Tuned,
)

__all__ = [
    "MAY_CHANGE",
    "Adaptive",
    "DataSection",
    "Distill",
    "HeadRunConfig",
    "HeadSection",
    "HeadTarget",
    "LMConfig",
    "MeshSection",
    "Model",
    "Optim",
    "Run",
    "SDSATConfig",
    "TokenizerSection",
    "Tuned",
    "fixed_settings",
    "from_dict",
    "from_toml",
    "read_toml",
    "require_same",
    "to_dict",
]
