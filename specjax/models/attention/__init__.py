"""Attention: dense, over long sequences, over long caches."""
