"""Reads answers whose parts are messages in channels: OpenAI's Harmony, of gpt-oss.

A message is ``<|channel|>NAME<|message|>TEXT`` and an end. ``to=functions.NAME``, before the
channel or after it, makes the text a call's arguments. The channel ``analysis`` has thoughts.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from infer.serve.tools.families import ToolFamily
from infer.serve.tools.reader import CallReader, Schemas, overlap

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
# How a message begins. The prompt ends with "<|start|>assistant", so that is not there at first.
BEGINS = ("<|start|>", "<|channel|>", "to=", "assistant")
HEADER = re.compile(
    r"(?:<\|start\|>)?\s*(?:assistant)?\s*(?:to=(?P<before>[\w.-]+))?\s*"
    r"<\|channel\|>\s*(?P<channel>\w+)\s*(?:to=(?P<after>[\w.-]+))?\s*(?:<\|constrain\|>)?\s*\w*\s*"
)
LONGEST_HEADER = 256  # characters; a longer one is text
FUNCTIONS = "functions."


class ChannelCalls(CallReader):
    """Reads messages one after the other. A text that is no message is content."""

    def __init__(self, family: ToolFamily, most: int | None = None, schemas: Schemas | None = None):
        super().__init__(family, most, schemas)
        self._body: Callable[[str], None] | None = None  # takes the text of an open message

    def _step(self) -> bool:
        if self._body is None:
            return self._read_header()
        return self._read_body(self._body)

    def _finish(self) -> None:
        if self._body is not None:
            self._body(self._text)
        else:
            self._write(self._text)

    def _read_header(self) -> bool:
        text = self._text
        start = text.lstrip()
        at = text.find(MESSAGE)
        if at < 0:
            may_begin = any(start.startswith(begin) or begin.startswith(start) for begin in BEGINS)
            if may_begin and len(text) < LONGEST_HEADER + len(MESSAGE):
                return False
        header = HEADER.fullmatch(text[:at]) if 0 <= at <= LONGEST_HEADER else None
        if header is None:
            # One character at least, for the text may begin with what ends a message.
            self._write(text[0])
            self._text = text[1:]
            self._body = self._write
            return True
        self._text = text[at + len(MESSAGE) :]
        self._body = self._open(header)
        return True

    def _open(self, header: re.Match[str]) -> Callable[[str], None]:
        """Begins a message; returns what takes its text."""
        recipient = header["before"] or header["after"] or ""
        if recipient.startswith(FUNCTIONS):
            call = self._new_call(recipient.removeprefix(FUNCTIONS))
            return lambda text: self._add_arguments(call, call["function"]["arguments"] + text)
        if header["channel"] == "analysis":
            return self._think
        if self.content:
            self._write("\n")
        return self._write

    def _read_body(self, body: Callable[[str], None]) -> bool:
        """Reads up to the message's end."""
        text = self._text
        found = min((at for at in map(text.find, ENDS) if at >= 0), default=-1)
        if found < 0:
            shown = len(text) - max(overlap(text, end) for end in ENDS)
            body(text[:shown])
            self._text = text[shown:]
            return False
        body(text[:found])
        self._text = text[found:]
        for end in ENDS[:3]:  # the others begin the next message
            self._text = self._text.removeprefix(end)
        self._body = None
        return True
