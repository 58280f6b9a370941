"""Decoder-only language models as Flax NNX modules and pure functions of their params."""

from specjax.models.blocks import fuse
from specjax.models.cache import KVCache, init_cache
from specjax.models.config import ModelConfig, RopeConfig
from specjax.models.families import from_hf, to_hf
from specjax.models.forward_pass import (
    forward,
    head_matrix,
    hidden_states,
    init_params,
    logits_of,
    num_params,
    param_shapes,
    splits_tables,
)
from specjax.models.hf.read import load_pretrained
from specjax.models.hf.write import save_pretrained

__all__ = [
    "KVCache",
    "ModelConfig",
    "RopeConfig",
    "forward",
    "from_hf",
    "fuse",
    "head_matrix",
    "hidden_states",
    "init_cache",
    "init_params",
    "load_pretrained",
    "logits_of",
    "num_params",
    "param_shapes",
    "save_pretrained",
    "splits_tables",
    "to_hf",
]
