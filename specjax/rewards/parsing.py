"""Whether an unfinished text is well formed so far: JSON and Python."""

from __future__ import annotations

import ast
import json
import re
import warnings

VALID = "valid"
OPEN = "open"
INVALID = "invalid"
JSON_CLOSERS = {"[": "]", "{": "}"}
PYTHON_CLOSERS = {"(": ")", "[": "]", "{": "}"}
# The first line of a function or class, with its indentation.
HEADER = re.compile(r"^([ \t]*)(?:async[ \t]+def|def|class)\b", re.MULTILINE)
# One token of Python, as far as strings, comments and brackets go. ``text`` opens a triple-quoted
# string, ``quote`` a plain one.
_TOKEN = re.compile(
    r"""(?P<text>(?i:[rbuf]{,2})(?:'''|\"\"\"))|(?P<quote>['"])|(?P<comment>\#[^\n]*)"""
    r"""|(?P<open>[\[({])|(?P<close>[\])}])|(?P<other>\\.|.)""",
    re.VERBOSE | re.DOTALL,
)


# --- JSON ------------------------------------------------------------------------------------


def json_state(text: str) -> str:
    """``valid``, ``open`` (the beginning of a valid JSON text) or ``invalid``."""
    try:
        # parse_int=len: Python limits the digits of an integer, JSON does not.
        json.loads(text, parse_int=len, parse_constant=_refuse)
        return VALID
    except RecursionError:  # nested too deeply to tell
        return INVALID
    except ValueError:
        return OPEN if _can_become_json(text) else INVALID


def _refuse(constant: str) -> None:
    """NaN and the infinities, which Python reads and JSON does not have."""
    raise ValueError(constant)


def _can_become_json(text: str) -> bool:
    """Whether some continuation makes the text valid JSON: a few are appended and parsed.

    The last token and the open brackets decide what can follow. So for every valid beginning one
    of a few endings works.
    """
    closers = []
    in_string = False
    escaped = False
    for char in text:
        if in_string:
            if char == '"' and not escaped:
                in_string = False
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_string = True
        elif char in JSON_CLOSERS:
            closers.append(JSON_CLOSERS[char])
        elif char in JSON_CLOSERS.values() and (not closers or closers.pop() != char):
            return False
    tail = "".join(reversed(closers))
    return any(_is_json(text + ending + tail) for ending in _endings(text, in_string))


def _endings(text: str, in_string: bool) -> list[str]:
    """Texts that may complete the last token and the last member of an array or object."""
    if in_string:
        # An escape may be unfinished, and the string may be a value or a key.
        escapes = ["", "n", "0", "00", "000", "0000", "u0000"]
        return [escape + end for escape in escapes for end in ('"', '":0')]
    word = re.search(r"(?<![\w.])[a-z]+$", text)
    if word:
        literals = ("true", "false", "null")
        return [literal[len(word[0]) :] for literal in literals if literal.startswith(word[0])]
    # Nothing is missing, or: a value or digits of a number; a colon and a value; a whole member.
    return ["", "0", ":0", '"":0']


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=len, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


# --- Python ----------------------------------------------------------------------------------


def parses_as_python(prompt: str, text: str) -> bool:
    """Whether prompt and completion parse, as they are or after open parts are closed.

    A prompt may begin in the middle of a file. So only its last ``def`` or ``class`` and what
    follows is parsed, or all of it if there is none. Open strings and brackets are closed, and an
    open block gets a ``pass``. An unfinished last line may be left out.
    """
    headers = list(HEADER.finditer(prompt))
    start = headers[-1].start() if headers else 0
    code = prompt[start:] + text
    indentation = headers[-1][1] if headers else ""
    if indentation:
        # Inside a block, so that a line with less indentation may follow the function.
        code = "if 1:\n" + code
    without_last_line = code.rstrip(" \t").rpartition("\n")[0]
    candidates = (code, without_last_line)
    return any(_parses(candidate) or _parses(closed(candidate)) for candidate in candidates)


def closed(code: str) -> str:
    """The code with its open strings and brackets closed, and a ``pass`` in an open block."""
    closers = []
    quote = ""
    at = 0
    while at < len(code):
        token = _TOKEN.match(code, at)
        assert token is not None, "the pattern matches any character"
        at = token.end()
        if token["text"] or token["quote"]:
            # A prefix such as rb stands before the quotes, so they are the last three characters.
            mark = token["quote"] or token[0][-3:]
            end = _end_of_string(code, at, mark)
            if end is None:
                quote = mark
                break
            at = end
        elif token["open"]:
            closers.append(PYTHON_CLOSERS[token[0]])
        elif token["close"] and closers and closers[-1] == token[0]:
            closers.pop()
    return _with_block_body(code + quote + "".join(reversed(closers)))


def _with_block_body(code: str) -> str:
    """The code, with a ``pass`` after a last line that opens a block."""
    for line in reversed(code.split("\n")):
        statement = line.split("#")[0]
        if statement.strip():
            if statement.rstrip().endswith(":"):
                indentation = line[: len(line) - len(line.lstrip())]
                return f"{code}\n{indentation} pass"
            break
    return code


def _end_of_string(code: str, at: int, mark: str) -> int | None:
    """Where the string whose text begins at ``at`` ends; None where it is open."""
    while at < len(code):
        if code.startswith(mark, at):
            return at + len(mark)
        if len(mark) == 1 and code[at] == "\n":
            return at  # not a valid string; the parser will report it
        at += 2 if code[at] == "\\" else 1
    return None


def _parses(code: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):  # such as invalid escapes
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
