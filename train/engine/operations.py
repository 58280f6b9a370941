"""What a model computes over a row, in floating-point operations; a log's MFU is made of them."""

from __future__ import annotations

from specjax.models import ModelConfig, num_params


def forward_operations(model: ModelConfig, tokens: int, pairs: float) -> float:
    """Of a forward pass over so many tokens, whose attention runs over so many pairs of them.

    Two per parameter and token, and scores and values of each pair. Backward takes twice as many.
    """
    lookups = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    products = 2 * (num_params(model) - lookups) * tokens
    return float(products + 4 * pairs * model.num_heads * model.head_dim * model.num_layers)


def causal_operations(model: ModelConfig, length: int) -> float:
    """Per token of a forward pass over a document of ``length`` tokens, of the pairs seen."""
    return forward_operations(model, length, length**2 / 2) / length
