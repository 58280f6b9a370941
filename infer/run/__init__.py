"""Decode with any method: one prompt, a file of prompts, or the demo."""
