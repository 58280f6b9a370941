"""Whether a text that may go on is well formed so far: JSON and Python."""

from __future__ import annotations

import ast
import json
import re
import warnings

VALID, OPEN, INVALID = "valid", "open", "invalid"
CLOSER = {"[": "]", "{": "}"}
HEAD = re.compile(r"^([ \t]*)(?:async[ \t]+def|def|class)\b", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<text>(?i:[rbuf]{,2})(?:'''|\"\"\"))|(?P<quote>['"])|(?P<comment>\#[^\n]*)"""
    r"""|(?P<open>[\[({])|(?P<close>[\])}])|(?P<other>\\.|.)""",
    re.VERBOSE | re.DOTALL,
)
_PAIRS = {"(": ")", "[": "]", "{": "}"}


def json_state(text: str) -> str:
    """``valid``, ``open`` (the beginning of a valid JSON text) or ``invalid``."""
    try:
        json.loads(text, parse_int=len)  # Python's integers have a longest, JSON's do not
        return VALID
    except RecursionError:
        return INVALID
    except ValueError:
        return OPEN if _json_begins(text) else INVALID


def _json_begins(text: str) -> bool:
    """Whether some continuation makes the text valid: it is completed and parsed.

    What can follow is decided by the last token and the open brackets; one of a few endings
    fits every beginning.
    """
    brackets, inside, escaped = [], False, False
    for char in text:
        if inside:
            escaped, inside = (char == "\\" and not escaped), escaped or char != '"'
        elif char == '"':
            inside = True
        elif char in CLOSER:
            brackets.append(CLOSER[char])
        elif char in CLOSER.values() and (not brackets or brackets.pop() != char):
            return False
    tail = "".join(reversed(brackets))
    return any(_is_json(text + ending + tail) for ending in _endings(text, inside))


def _endings(text: str, inside: bool) -> list[str]:
    """Texts that may complete the last token and the last member."""
    if inside:
        # Inside a string: an escape may be unfinished; the string is a value or a key.
        escapes = ["", "n", "0", "00", "000", "0000", "u0000"]
        return [escape + end for escape in escapes for end in ('"', '":0')]
    word = re.search(r"(?<![\w.])[a-z]+$", text)
    if word:
        return [w[len(word[0]) :] for w in ("true", "false", "null") if w.startswith(word[0])]
    # Nothing missing; a value; a colon and a value; a whole member; digits of a number.
    return ["", "0", ":0", '"":0']


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=len)
    except (ValueError, RecursionError):
        return False
    return True


def parses_as_python(prompt: str, text: str) -> bool:
    """Whether prompt and completion parse, as they are or once what is open is closed.

    Parsed is what follows the start of the prompt's last ``def`` or ``class`` (all of it if
    there is none): a prompt may begin anywhere. Open strings and brackets are closed, an open
    block gets a ``pass``, and an unfinished last line may be left out.
    """
    heads = list(HEAD.finditer(prompt))
    code = (prompt[heads[-1].start() :] if heads else prompt) + text
    if heads and heads[-1][1]:
        code = "if 1:\n" + code  # an indented function may be followed by a line that is not
    lines = code.rstrip(" \t").rpartition("\n")[0]
    return any(_parses(c) or _parses(closed(c)) for c in (code, lines))


def closed(code: str) -> str:
    """The code with its open strings and brackets closed and a ``pass`` in an open block."""
    brackets, ending, at = [], "", 0
    while at < len(code):
        token = _TOKEN.match(code, at)
        at = token.end()
        if token["text"] or token["quote"]:
            mark = token["quote"] or token[0][-3:]
            end = _end_of_string(code, at, mark)
            ending, at = (mark, len(code)) if end is None else (ending, end)
        elif token["open"]:
            brackets.append(_PAIRS[token[0]])
        elif token["close"] and brackets and brackets[-1] == token[0]:
            brackets.pop()
    code = code + ending + "".join(reversed(brackets))
    last = next((line for line in reversed(code.split("\n")) if line.split("#")[0].strip()), "")
    if last.split("#")[0].rstrip().endswith(":"):
        code += "\n" + last[: len(last) - len(last.lstrip())] + " pass"
    return code


def _end_of_string(code: str, at: int, mark: str) -> int | None:
    """Where the string that began before ``at`` ends; None where it is open."""
    while at < len(code):
        if code.startswith(mark, at):
            return at + len(mark)
        if len(mark) == 1 and code[at] == "\n":
            return at  # no string any more: the parser will say so
        at += 2 if code[at] == "\\" else 1
    return None


def _parses(code: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):  # such as invalid escapes
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
