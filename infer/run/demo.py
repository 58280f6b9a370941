"""The arguments of ``python -m infer.run`` if none are given."""

PROMPT = '''def join(parts, separator="/"):
    """Join parts to a path."""'''

# Greedy text of a small model soon repeats itself. This prompt and length end before it does.
ARGUMENTS = ("--prompt", PROMPT, "--max-new-tokens", "64")
