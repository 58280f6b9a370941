"""The training programs, one folder each, and what they share: config, data, engine."""
