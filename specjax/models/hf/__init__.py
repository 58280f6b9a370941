"""Hugging Face directories: configs, tensor names, checkpoints, pickles."""
