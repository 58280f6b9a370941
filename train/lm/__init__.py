"""Pre-train a model, or distil a draft."""
