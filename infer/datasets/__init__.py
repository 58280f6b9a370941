"""Datasets as their authors publish them, read as the prompts of the papers."""
