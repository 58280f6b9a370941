"""Train a head on a target's hidden states (EAGLE-3)."""
