"""Tune a method's options on a validation file: of CDSL (``cdsl``) or of another (``lossy``)."""
