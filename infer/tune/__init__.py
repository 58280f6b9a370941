"""Tune a lossy method on a validation file: CDSL (``cdsl``) or another one (``lossy``)."""
