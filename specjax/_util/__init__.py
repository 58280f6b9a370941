"""Helpers of every package here: checks of values, errors, files, programs, processes."""
