"""Reads calls of tools in a model's text, while it is written.

What comes out does not depend on how the text is cut into pieces. Text that looks like a call and
is none stays text.
"""

from __future__ import annotations

import json
import re
from typing import Any

from infer.serve.tools.families import ToolFamily
from infer.serve.tools.json_object import JsonObject

Object = dict[str, Any]

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


class ToolCalls:
    """The text and the calls of one answer.

    Args:
      family: how its model writes calls.
      most: calls that count; None: all. Further ones are dropped.

    Attributes:
      content: the text outside of calls, without the spaces before them.
      calls: as OpenAI has them in a message.
    """

    def __init__(self, family: ToolFamily, most: int | None = None):
        self._family = family
        self._most = most
        self.content = ""
        self.calls: list[Object] = []

        self._text = ""  # that is not read yet
        self._blank = True  # there were only spaces so far
        self._inside = False  # behind a marker
        self._found = False  # there was a call behind it
        self._raw = ""  # text since the marker, with it, that no call has
        self._object: JsonObject | None = None  # that is being read
        self._call: Object | None = None  # of that object, once its name is known
        self._begin = 0  # of the call's arguments in the object
        self._delta: Object = {}

    def push(self, text: str, last: bool = False) -> Object:
        """Adds text; returns what is new, as OpenAI's ``delta`` has it. ``last``: it is all."""
        self._text += text
        self._delta = {}
        while self._step():
            pass
        if last:
            self._finish()
        return self._delta

    def _step(self) -> bool:
        """Reads on; False: more text must come first."""
        if self._object is not None:
            return self._read_object(self._object)
        if self._inside:
            return self._read_between()
        return self._read_content()

    def _finish(self) -> None:
        """The end of the text. A call that is cut off stays as it is."""
        if self._object is not None:
            if self._call is None:
                self._drop(self._object)
        elif self._inside:
            self._leave()
            if not self._found:
                self._write(self._text)
        elif self._text.strip() or not self.calls:
            self._write(self._text)
        self._text = ""

    # --- text ----------------------------------------------------------------------------------

    def _read_content(self) -> bool:
        marker = self._family.marker
        if self._blank:
            start = self._text.lstrip()
            self._blank = not start
            if self._family.bare and start.startswith("{"):
                self._enter(len(self._text) - len(start), "")
                return True
        at = self._text.find(marker)
        if at >= 0:
            self._enter(at, marker)
            return True
        # The end may begin a marker, and spaces before a marker are not shown.
        end = len(self._text) - _overlap(self._text, marker)
        end = len(self._text[:end].rstrip())
        self._write(self._text[:end])
        self._text = self._text[end:]
        return False

    def _enter(self, at: int, marker: str) -> None:
        """Goes behind a marker at ``at``."""
        before = self._text[:at]
        shown = before.rstrip()
        self._write(shown)
        self._raw = before[len(shown) :] + marker
        self._text = self._text[at + len(marker) :]
        self._inside = True
        self._found = False

    def _leave(self) -> None:
        """Goes on with text. What no call has since the marker is text, too."""
        if not self._found:
            self._write(self._raw)
        self._raw = ""
        self._inside = False

    def _write(self, text: str) -> None:
        if text:
            self.content += text
            self._delta["content"] = self._delta.get("content", "") + text

    # --- calls ---------------------------------------------------------------------------------

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

    def _take(self, size: int) -> None:
        """Moves text to ``_raw``."""
        self._raw += self._text[:size]
        self._text = self._text[size:]

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
        function = {"name": name, "arguments": ""}
        self._call = {"id": self._family.new_id(), "type": "function", "function": function}
        self._begin = begin
        if self._most is None or len(self.calls) < self._most:
            self.calls.append(self._call)
            new = {"index": len(self.calls) - 1, **self._call, "function": dict(function)}
            self._delta.setdefault("tool_calls", []).append(new)

    def _open_whole(self, text: str) -> bool:
        """Makes a call of a whole object, its fields in any order; False: it is none."""
        value = _json(text)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return False
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str):  # some models write them as a text of JSON
            arguments = json.dumps(arguments, ensure_ascii=False)
        self._open(value["name"], 0)
        assert self._call is not None, "it was just opened"
        self._add_arguments(self._call, arguments)
        return True

    def _add_arguments(self, call: Object, arguments: str) -> None:
        """The arguments of the last call so far, as they were written."""
        new = arguments[len(call["function"]["arguments"]) :]
        if not new or call not in self.calls:
            return
        call["function"]["arguments"] = arguments
        index = len(self.calls) - 1
        deltas = self._delta.setdefault("tool_calls", [])
        if not deltas or deltas[-1]["index"] != index:
            deltas.append({"index": index, "function": {"arguments": ""}})
        deltas[-1]["function"]["arguments"] += new


def _overlap(text: str, marker: str) -> int:
    """The characters at the end of a text that may begin the marker."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def _json(text: str) -> Any:
    """The value of a text of JSON; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
