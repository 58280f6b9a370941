"""Says what is wrong with a field in one plain sentence, from what pydantic found.

pydantic's own sentences name Python's types and the branches of its unions. Clients know neither.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from specjax._util.checks import format_value, quoted

MARK = "<"  # begins the tags of unions, which pydantic puts into a field's path
UNSUPPORTED_TYPE = "unsupported"  # the type of our own error

# What was expected, by pydantic's type of error; the braces are its context.
EXPECTED = {
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of at most 64 bits",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "finite_number": "a finite number",
    "string_too_short": "at least {min_length} character",
    "string_too_long": "at most {max_length} characters",
    "string_unicode": "whole characters, not half of a surrogate pair",
    "too_short": "at least {min_length} entry",
    "too_long": "at most {max_length} entries",
    "literal_error": "one of {expected}",
    "string_pattern_mismatch": "a text that fits {pattern}",
}


def describe(
    error: Mapping[str, Any], fields: Collection[str], unsupported: Collection[str]
) -> tuple[str, str]:
    """The field's path, as ``messages[0].role``, and one sentence about it.

    Args:
      error: one of those that pydantic's ``ValidationError.errors`` returns.
      fields: the names of the body's fields, for a guess at what was meant.
      unsupported: names that OpenAI or vLLM know, and this server does not.
    """
    path = _path(error["loc"])
    where = path or "the body"
    kind = error["type"]
    context = error.get("ctx", {})
    if kind == "missing":
        return path, f"{where} is missing"
    if kind == UNSUPPORTED_TYPE:
        what = context.get("what", "with this value")
        return path, f"{where}: not supported {what}; leave it out"
    if kind == "extra_forbidden":
        return path, _unknown(path, fields, unsupported)
    if kind == "no_such_kind":
        expected = error["msg"].removeprefix("expected ")
    else:
        expected = EXPECTED.get(kind, "another value").format_map(_plain(context))
    return path, f"{where}={_shown(error['input'])}: expected {expected}"


def _plain(context: Mapping[str, Any]) -> dict[str, Any]:
    """Bounds without the ``.0`` that pydantic gives to those of floats."""
    return {
        name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()
    }


def _shown(value: Any) -> str:
    """A value in a message; a text has quotes, for ``"1"`` is not 1."""
    if isinstance(value, str):
        return quoted(value)
    return "{…}" if isinstance(value, dict) else format_value(value)


def _unknown(path: str, fields: Collection[str], unsupported: Collection[str]) -> str:
    """The sentence about a field that the body may not have."""
    if path in unsupported:
        return f"{path}: not supported; leave it out"
    # The names are those of the body: a field inside another one has names of its own.
    close = [] if "." in path else difflib.get_close_matches(path, fields, 1)
    advice = "leave it out"
    if close:
        advice = f"did you mean {close[0]!r}?"
    return f"{path}: there is no such field; {advice}"


def _path(location: tuple[int | str, ...]) -> str:
    """A path as OpenAI writes it, without pydantic's names of union branches."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith(MARK):
            path += f".{step}" if path else step
    return path
