"""Measure methods side by side."""
