"""Reads calls whose arguments are JSON: Hermes, Llama 3, Mistral."""

from __future__ import annotations

import json
import re
from typing import Any

from infer.serve.tools.families import ToolFamily
from infer.serve.tools.json_object import JsonObject
from infer.serve.tools.reader import MarkedReader, Object, Schemas

# Between calls. With names in JSON, some models of every family write a list.
SPACES = re.compile(r"\s*")
SEPARATORS = re.compile(r"[\s\[\],;]*")
# The usual beginning of a call. Other orders of its fields are read once the call has ended.
HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
# A name before the arguments, and what may become one.
ARGS = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)")
BEGUN_ARGS = re.compile(r"[\w.-]*(\[[A-Z_]*(\]\s*|\]\w*(\[[A-Z]*(\]\s*)?)?)?)?")


class JsonCalls(MarkedReader):
    """Reads calls whose arguments are an object of JSON."""

    def __init__(self, family: ToolFamily, most: int | None = None, schemas: Schemas | None = None):
        super().__init__(family, most, schemas)
        self._object: JsonObject | None = None  # that is being read
        self._call: Object | None = None  # of that object, once its name is known
        self._begin = 0  # of the call's arguments in the object

    def _step(self) -> bool:
        if self._object is not None:
            return self._read_object(self._object)
        if self._inside:
            return self._read_between()
        return self._read_content()

    def _finish(self) -> None:
        if self._object is None:
            self._finish_text()
        elif self._call is None:
            self._drop(self._object)

    def _read_between(self) -> bool:
        """Reads up to the next call, or to the end of calls."""
        family = self._family
        separators = (SPACES if family.name_first else SEPARATORS).match(self._text)
        assert separators is not None, "it matches every text"
        self._take(separators.end())
        if self._text.startswith("{"):
            self._object = JsonObject()
            return True
        if self._text.startswith(family.marker):
            self._leave()
            return True
        end = family.end.strip()
        if end and self._text.startswith(end):
            self._take(len(end))
            self._leave()
            return True
        if family.marker.startswith(self._text) or end.startswith(self._text):
            return False
        if family.name_first:
            head = ARGS.match(self._text)
            if head:
                self._take(head.end())
                self._object = JsonObject()
                self._open(head[1], 0)
                return True
            if BEGUN_ARGS.fullmatch(self._text):
                return False
        self._leave()
        return True

    def _read_object(self, current: JsonObject) -> bool:
        self._text = current.add(self._text)
        if self._call is None:
            head = HEAD.match(current.text)
            name = _json(head[1]) if head else None
            if head and isinstance(name, str):
                self._open(name, head.end())
        if self._call is not None:
            # With the name before the object, all of it is arguments.
            end = current.inner_end if self._begin else current.end
            self._add_arguments(self._call, current.text[self._begin : end])
        if current.end is None:
            return False
        if self._call is None and not self._open_whole(current.text):
            self._drop(current)
            return True
        self._found = True
        self._raw = ""
        self._object = None
        self._call = None
        return True

    def _drop(self, current: JsonObject) -> None:
        """The object was no call: it is text."""
        self._object = None
        self._leave()
        self._write(current.text)

    def _open(self, name: str, begin: int) -> None:
        """Begins a call, whose arguments begin at ``begin`` of its object."""
        self._call = self._new_call(name)
        self._begin = begin

    def _open_whole(self, text: str) -> bool:
        """Makes a call of a whole object, its fields in any order; False: it is none."""
        value = _json(text)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return False
        has_arguments = "arguments" in value or "parameters" in value
        if self._family.bare and not has_arguments and value["name"] not in self._schemas:
            return False  # an answer in JSON
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str):  # some models write them as a text of JSON
            arguments = json.dumps(arguments, ensure_ascii=False)
        self._open(value["name"], 0)
        assert self._call is not None, "it was just opened"
        self._add_arguments(self._call, arguments)
        return True


def _json(text: str) -> Any:
    """The value of a text of JSON; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
