"""Pre-train a model, or distill a draft model."""
