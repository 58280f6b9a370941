"""The arguments of ``python -m infer.run`` if none are given."""

PROMPT = '''def join(parts, separator="/"):
    """Join parts to a path."""'''

# The greedy text of so small a model soon repeats itself; after this prompt it does not yet.
ARGUMENTS = ("--prompt", PROMPT, "--max-new-tokens", "64")
