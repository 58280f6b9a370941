"""The inference programs, one folder each, and what they share: arguments, prompts, reports."""
