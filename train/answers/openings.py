"""Beginnings of what a user says, for conversations that the model writes alone."""

from __future__ import annotations

from specjax._util.errors import InputError
from specjax._util.files import read_file

OPENINGS = (
    *("What is", "What are the", "How do I", "How does", "Why do", "Why is", "When did", "Who was"),
    *("Explain", "Explain to a child how", "Describe", "Summarize", "Compare", "List five"),
    *("Write a short story about", "Write a poem about", "Write an email that", "Write a Python"),
    *("Give me advice on", "Give an example of", "Help me to", "Can you", "Could you explain"),
    *("Translate", "Rewrite this sentence:", "Correct the grammar of:", "Solve", "Calculate"),
    *("I am planning", "I need a recipe for", "I want to learn", "My computer", "In which year"),
    *("Is it true that", "What is the difference between", "Tell me about", "Suggest a name for"),
    *("Imagine that", "Create a plan for", "Which of these", "Fix the bug in"),
)


def read_openings(path: str) -> tuple[str, ...]:
    """The lines of a file that are not empty.

    Raises:
      InputError: it cannot be read, or has no such line.
    """
    try:
        text = read_file(path).decode()
    except OSError as error:
        raise InputError(f"--openings {path}: cannot be read ({error.strerror})") from None
    except UnicodeError:
        raise InputError(f"--openings {path}: it is not UTF-8") from None
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not lines:
        raise InputError(f"--openings {path}: expected a beginning of a question in each line")
    return lines
