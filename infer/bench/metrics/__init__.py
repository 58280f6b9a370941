"""Scores of completions: ``infer.bench --metric NAME[:ARG]``, one file per metric."""
