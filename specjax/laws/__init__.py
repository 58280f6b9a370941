"""Exact tests of a sampler's distribution, and adapters for samplers of other libraries."""

from specjax.laws.exact import (
    ALPHA,
    SAMPLES,
    SLIPS,
    NextLaw,
    Report,
    check,
    histogram,
    joint,
    model_law,
    p_value,
    power,
    speculative_joint,
)
from specjax.laws.openai_server import ServerSampler
from specjax.laws.transformers_model import TransformersSampler

__all__ = [
    "ALPHA",
    "SAMPLES",
    "SLIPS",
    "NextLaw",
    "Report",
    "ServerSampler",
    "TransformersSampler",
    "check",
    "histogram",
    "joint",
    "model_law",
    "p_value",
    "power",
    "speculative_joint",
]
