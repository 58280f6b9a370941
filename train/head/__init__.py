"""Train an EAGLE-3 head on a target's hidden states."""
