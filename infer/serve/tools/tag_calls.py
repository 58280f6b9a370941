"""Reads calls whose arguments are tags, not JSON: Qwen3-Coder and GLM.

Spaces between tags are free. Arguments become JSON: a value is a text where the function's schema
says so, else what it is as JSON, else a text.
"""

from __future__ import annotations

import json
import re
from typing import Any

from infer.serve.tools.families import ToolFamily
from infer.serve.tools.reader import MarkedReader, Object, Schemas
from specjax._util.files import parse_json

NAMES = {"NAME": r"([\w.-]+)", "KEY": r"([^<>\n]+)"}


class TagCalls(MarkedReader):
    """Reads calls of a family that has keys. Each argument comes once its value has ended."""

    def __init__(self, family: ToolFamily, most: int | None = None, schemas: Schemas | None = None):
        super().__init__(family, most, schemas)
        head = _pieces(family.head)
        key = _pieces(family.key)
        # Where the arguments have an end of their own, calls have another around them.
        end = _pieces(family.tail or family.end)
        behind_head = f"(?={''.join(key)}|{''.join(end)})"
        self._head = re.compile("".join(head) + behind_head)
        self._begun_head = _beginning(head, f"(?:{_nested(key)}|{_nested(end)})")
        self._key = re.compile("".join(key))
        self._begun_key = _beginning(key)
        self._end = re.compile("".join(end))
        self._begun_end = _beginning(end)
        around = _pieces(family.end)
        self._outer_end = re.compile("".join(around))
        self._begun_outer_end = _beginning(around)

        self._call: Object | None = None  # that is being read
        self._arguments: Object = {}  # of that call so far
        self._name: str | None = None  # of the argument whose value is being read

    def _step(self) -> bool:
        if self._name is not None:
            return self._read_value(self._name)
        if self._call is not None:
            return self._read_argument(self._call)
        if self._inside:
            return self._read_head()
        return self._read_content()

    def _finish(self) -> None:
        if self._call is None:
            self._finish_text()

    def _read_head(self) -> bool:
        """Reads up to a call's arguments, or to the end of calls."""
        if self._found:
            end = self._outer_end.match(self._text)
            if end:
                self._text = self._text[end.end() :]
                self._leave()
                return True
            if self._begun_outer_end.fullmatch(self._text):
                return False
        head = self._head.match(self._text)
        if head:
            self._text = self._text[head.end() :]
            self._call = self._new_call(head[1])
            self._arguments = {}
            self._found = True
            self._raw = ""
            self._add_arguments(self._call, "{")
        elif self._begun_head.fullmatch(self._text):
            return False
        else:
            self._leave()
        return True

    def _read_argument(self, call: Object) -> bool:
        """Reads up to the next argument's value, or to the end of the call."""
        key = self._key.match(self._text)
        if key:
            self._text = self._text[key.end() :]
            self._name = key[1]
            return True
        end = self._end.match(self._text)
        if end is None and (
            self._begun_key.fullmatch(self._text) or self._begun_end.fullmatch(self._text)
        ):
            return False
        # What is neither an argument nor the end is text behind the call.
        self._text = self._text[end.end() if end else 0 :]
        self._add_arguments(call, call["function"]["arguments"] + "}")
        self._call = None
        if end is None or not self._family.tail:
            self._leave()
        return True

    def _read_value(self, name: str) -> bool:
        family = self._family
        value_end = family.value_end.strip()
        at = self._text.find(value_end)
        if at < 0:
            return False
        value = self._text[:at]
        if family.key.endswith("\n"):  # the value has lines of its own
            value = value.removeprefix("\n").removesuffix("\n")
        self._text = self._text[at + len(value_end) :]
        self._name = None
        call = self._call
        assert call is not None, "an argument belongs to a call"
        if name not in self._arguments:  # JSON has a key once
            comma = ", " if self._arguments else ""
            self._arguments[name] = value
            shown = self._as_json(call["function"]["name"], name, value)
            written = f"{comma}{json.dumps(name, ensure_ascii=False)}: {shown}"
            self._add_arguments(call, call["function"]["arguments"] + written)
        return True

    def _as_json(self, function: str, name: str, value: str) -> str:
        """An argument's value as JSON."""
        properties = (self._schemas.get(function) or {}).get("properties") or {}
        if not is_plain_text(properties.get(name)):
            try:
                parsed = parse_json(value.encode(errors="replace"))
                return json.dumps(parsed, ensure_ascii=False, allow_nan=False)
            except ValueError:  # no JSON: a text
                pass
        return json.dumps(value, ensure_ascii=False)


def is_plain_text(schema: Any) -> bool:
    """Whether all values that fit a schema are texts, which these families write without quotes."""
    if not isinstance(schema, dict):
        return False
    if "enum" in schema:
        return all(isinstance(value, str) for value in schema["enum"])
    return schema.get("type") == "string" or isinstance(schema.get("const"), str)


def _pieces(template: str) -> list[str]:
    """The regular expressions of a template's characters and names, with any spaces between tags.

    Spaces at its end are left out: they may belong to a value.
    """
    pieces = [r"\s*"]
    for part in re.split(r"(NAME|KEY|\s+)", template.strip()):
        if part in NAMES:
            pieces.append(NAMES[part])
        elif part.isspace():
            pieces.append(r"\s*")
        else:
            pieces += map(re.escape, part)
    return pieces


def _nested(pieces: list[str], rest: str = "") -> str:
    """An expression for what may become a text of these pieces, and then of ``rest``."""
    for piece in reversed(pieces):
        rest = f"(?:{piece}{rest})?"
    return rest


def _beginning(pieces: list[str], rest: str = "") -> re.Pattern[str]:
    return re.compile(_nested(pieces, rest))
