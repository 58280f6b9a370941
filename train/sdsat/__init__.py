"""Tune a model to draft for itself."""
