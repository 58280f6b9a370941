"""What readers of all families share: the message as it grows, and the text around calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infer.serve.tools.families import ToolFamily

Object = dict[str, Any]
Schemas = Mapping[str, Mapping[str, Any] | None]  # of functions' arguments, by name


class CallReader:
    """The text and the calls of one answer.

    What comes out does not depend on how the text is cut into pieces. Text that looks like a call
    and is none stays text.

    Args:
      family: how its model writes calls.
      most: calls that count; None: all. Further ones are dropped.
      schemas: of the functions that were offered.

    Attributes:
      content: the text outside of calls.
      reasoning: what the model thought, where its form tells thoughts from text.
      calls: as OpenAI has them in a message.
    """

    def __init__(self, family: ToolFamily, most: int | None = None, schemas: Schemas | None = None):
        self._family = family
        self._most = most
        self._schemas = schemas or {}
        self.content = ""
        self.reasoning = ""
        self.calls: list[Object] = []

        self._text = ""  # that is not read yet
        self._delta: Object = {}

    def push(self, text: str, last: bool = False) -> Object:
        """Adds text; returns what is new, as OpenAI's ``delta`` has it. ``last``: it is all."""
        self._text += text
        self._delta = {}
        while self._step():
            pass
        if last:
            self._finish()
            self._text = ""
        return self._delta

    def _step(self) -> bool:
        """Reads on; False: more text must come first."""
        raise NotImplementedError

    def _finish(self) -> None:
        """The end of the text. A call that is cut off stays as it is."""
        raise NotImplementedError

    def _write(self, text: str) -> None:
        if text:
            self.content += text
            self._delta["content"] = self._delta.get("content", "") + text

    def _think(self, text: str) -> None:
        if text:
            self.reasoning += text
            self._delta["reasoning_content"] = self._delta.get("reasoning_content", "") + text

    def _new_call(self, name: str) -> Object:
        """A call without arguments so far; one too many is not listed."""
        function = {"name": name, "arguments": ""}
        call = {"id": self._family.new_id(), "type": "function", "function": function}
        if self._most is None or len(self.calls) < self._most:
            self.calls.append(call)
            new = {"index": len(self.calls) - 1, **call, "function": dict(function)}
            self._delta.setdefault("tool_calls", []).append(new)
        return call

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


class MarkedReader(CallReader):
    """A reader of a family whose marker begins calls. Spaces before calls are not shown."""

    def __init__(self, family: ToolFamily, most: int | None = None, schemas: Schemas | None = None):
        super().__init__(family, most, schemas)
        self._blank = True  # there were only spaces so far
        self._inside = False  # behind a marker
        self._found = False  # there was a call behind it
        self._raw = ""  # text since the marker, with it, that no call has

    def _read_content(self) -> bool:
        """Reads up to the next marker."""
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
        end = len(self._text) - overlap(self._text, marker)
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

    def _take(self, size: int) -> None:
        """Moves text to ``_raw``."""
        self._raw += self._text[:size]
        self._text = self._text[size:]

    def _finish_text(self) -> None:
        """The end of a text outside of an open call."""
        if self._inside:
            self._leave()
            if not self._found:
                self._write(self._text)
        elif self._text.strip() or not self.calls:
            self._write(self._text)


def overlap(text: str, marker: str) -> int:
    """The characters at the end of a text that may begin the marker."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
