"""The tools that made the embedded models."""
