"""SDSAT: fine-tune a model to draft for itself."""
