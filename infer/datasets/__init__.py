"""Datasets in the form that their authors publish, read as the prompts of the papers."""
