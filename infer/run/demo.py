"""What ``python -m infer.run`` does when nothing is asked for."""

PROMPT = '''def join(parts, separator="/"):
    """Join parts to a path."""'''

# So small a model's greedy text soon turns in circles; after this prompt it has not yet.
ARGUMENTS = ("--prompt", PROMPT, "--max-new-tokens", "64")
