"""Floating-point operations (FLOPs) of a model; the logged MFU is computed from them."""

from __future__ import annotations

from specjax.models import ModelConfig
from specjax.models.forward_pass import active_params


def forward_operations(model: ModelConfig, tokens: int, pairs: float) -> float:
    """FLOPs of a forward pass. The backward pass takes twice as many.

    Args:
      tokens: tokens of the pass; each parameter takes a multiplication and an addition per token.
      pairs: (query, key) pairs of the attention; each takes four FLOPs per dimension of a head,
        for its score and for its value.
    """
    # An embedding lookup multiplies nothing. A tied table is also the output layer, and counts.
    lookups = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    # Of a mixture's experts a token is multiplied with those that are chosen for it.
    products = 2 * (active_params(model) - lookups) * tokens
    return float(products + 4 * pairs * model.num_heads * model.head_dim * model.num_layers)


def causal_operations(model: ModelConfig, length: int) -> float:
    """FLOPs per token of a causal forward pass over a document of ``length`` tokens."""
    return forward_operations(model, length, length**2 / 2) / length
