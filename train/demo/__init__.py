"""Tools that made the embedded models."""
