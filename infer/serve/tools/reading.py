"""Reads the calls in one answer, of its tokens and text as they come."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from infer.serve.schemas import ChatBody
from infer.serve.tools.channel_calls import ChannelCalls
from infer.serve.tools.families import ToolFamily
from infer.serve.tools.json_calls import JsonCalls
from infer.serve.tools.reader import CallReader, Object, Schemas
from infer.serve.tools.tag_calls import TagCalls
from specjax.runtime.output import Piece
from specjax.text.incremental_decoder import IncrementalDecoder
from specjax.text.tokenizer import Tokenizer


def call_reader(
    family: ToolFamily, most: int | None = None, schemas: Schemas | None = None
) -> CallReader:
    """The reader of a family's form."""
    if family.channels:
        return ChannelCalls(family, most, schemas)
    if family.key:
        return TagCalls(family, most, schemas)
    return JsonCalls(family, most, schemas)


class AnswerReader:
    """The text and the calls of one row of a request with tools."""

    def __init__(
        self, tokenizer: Tokenizer, family: ToolFamily, prompt: np.ndarray, body: ChatBody
    ):
        self._text = MarkedText(tokenizer, family, prompt.tolist())
        most = 1 if body.parallel_tool_calls is False else None
        functions = [tool.function for tool in body.offered_tools]
        schemas = {function.name: function.parameters for function in functions}
        self._calls = call_reader(family, most, schemas)

    @property
    def has_calls(self) -> bool:
        return bool(self._calls.calls)

    def add(self, piece: Piece) -> Object:
        """What a piece adds to the message, as OpenAI's ``delta`` has it."""
        return self._calls.push(self._text.add(piece), last=piece.finish_reason is not None)

    def message(self) -> Object:
        """``content``, ``tool_calls`` and ``reasoning_content`` of the whole message."""
        calls = self._calls
        message: Object = {"content": calls.content}
        if calls.calls:
            message = {"content": calls.content or None, "tool_calls": calls.calls}
        if calls.reasoning:
            message["reasoning_content"] = calls.reasoning
        return message


class MarkedText:
    """One row's text with the special tokens of a family, which have no text of their own.

    Text can lag behind tokens: what may be the beginning of a stop string is not shown yet.

    Args:
      prompt: the ids before the row's own.
    """

    def __init__(self, tokenizer: Tokenizer, family: ToolFamily, prompt: Sequence[int]):
        ids = {tokenizer.special_token(text): text for text in family.tokens}
        self._marks = {i: text for i, text in ids.items() if i is not None}
        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._decoded = 0  # characters of the tokens so far
        self._shown = 0  # characters of the pieces so far
        self._waiting: list[tuple[int, str]] = []  # marks, and the characters before each

    def add(self, piece: Piece) -> str:
        """The piece's text with the marks in it."""
        if not self._marks:
            return piece.text
        for token in piece.tokens.tolist():
            self._decoded += len(self._decoder.push([token]))
            if token in self._marks:
                self._waiting.append((self._decoded, self._marks[token]))
        parts = []
        text = piece.text
        while self._waiting and self._waiting[0][0] <= self._shown + len(text):
            at, mark = self._waiting.pop(0)
            parts += [text[: at - self._shown], mark]
            text = text[at - self._shown :]
            self._shown = at
        self._shown += len(text)
        return "".join([*parts, text])
