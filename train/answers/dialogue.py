"""A question and the answers to it so far: the next prompt, and at last the rows to train on.

Token ids are those that the model has read and written, and are never made from text again. A
template that rewrites what came before begins a new row, as in :mod:`train.data.chats`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from specjax.text.conversations import ASSISTANT, Conversation, Message
from specjax.text.tokenizer import Tokenizer
from train.answers.questions import Asked, is_answer
from train.data.chats import IDS, MASK, ChatFormat

USER_MARK = "specjax-user-turn"  # stands for what the user says, to find where it begins
EOS = "eos"  # why an answer has ended: by a token that ends it
LENGTH = "length"  # by the limit
SHORTEST_REPEATED = 16  # tokens at the end of an answer that repeats itself
LEAST_TIMES = 4  # that it repeats them


class Written(NamedTuple):
    """What the model has written: token ids with the one that ended it, and why it ended."""

    tokens: list[int]
    finish: str


@dataclasses.dataclass(frozen=True)
class Writer:
    """How conversations are written down for a model.

    Attributes:
      chats: renders them.
      tokenizer: the model's.
      leave_out_repeats: end a conversation before an answer that repeats itself to its limit.
    """

    chats: ChatFormat
    tokenizer: Tokenizer
    leave_out_repeats: bool = False

    def user_prefix(self) -> str:
        """What the template writes before the first turn of the user.

        Raises:
          ModelError: the template fails.
        """
        marked = Conversation([{"role": "user", "content": USER_MARK}])
        return self.chats.render(marked, 1, False).partition(USER_MARK)[0]


@dataclasses.dataclass
class Dialogue:
    """A conversation while it is answered.

    Attributes:
      question: what is asked.
      messages: the conversation so far.
      answers: how many answers there are; the user's own turn is none.
      finish: why each of them ended.
      rows: finished rows: ``messages``, ``input_ids``, ``loss_mask`` and ``finish_reason``.
      ended: why there are no further answers; empty: there may be.
      repeats: how many answers repeat themselves to the limit.
    """

    writer: Writer
    question: Asked
    messages: list[Message] = dataclasses.field(default_factory=list)
    answers: int = 0
    finish: list[str] = dataclasses.field(default_factory=list)
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    ended: str = ""
    repeats: int = 0
    _text: str = ""  # of the row that is being written, rendered
    _ids: list[int] = dataclasses.field(default_factory=list)
    _mask: list[int] = dataclasses.field(default_factory=list)

    def writes_user(self) -> bool:
        """Whether the model still has to write what the user says."""
        return self.question.opening is not None and not self.messages

    def is_complete(self) -> bool:
        """Whether nothing is left to be written."""
        if self.ended:
            return True
        return not self.writes_user() and self.answers >= max(1, len(self.question.turns))

    def prompt(self) -> list[int]:
        """The ids that the model goes on from.

        Raises:
          ModelError: the template refuses the conversation.
        """
        if self.writes_user():
            opened = self.writer.user_prefix() + (self.question.opening or "")
            return self.writer.chats.encode(opened)
        if self.question.turns:
            self.messages += self.question.turns[self.answers]
        conversation = Conversation(self.messages, self.question.tools)
        text = self.writer.chats.render(conversation, len(self.messages), True)
        if self._ids and text.startswith(self._text):
            added = self.writer.chats.encode(text[len(self._text) :], inside=True)
            self._ids += added
            self._mask += [0] * len(added)
        else:
            self._close_row()
            self._ids = self.writer.chats.encode(text)
            self._mask = [0] * len(self._ids)
        self._text = text
        return list(self._ids)

    def add(self, answer: Written) -> None:
        """Adds what the model has written after :meth:`prompt`."""
        if self.writes_user():
            self._add_user(answer)
            return
        repeats = answer.finish == LENGTH and repeats_itself(answer.tokens)
        self.repeats += repeats
        if repeats and self.writer.leave_out_repeats:
            self.end("repeats itself")
            return
        context = list(self._ids)
        self._ids += answer.tokens
        self._mask += [1] * len(answer.tokens)
        tokenizer = self.writer.tokenizer
        end_text = ""
        own = answer.tokens
        if answer.finish == EOS:
            end_text = tokenizer.id_to_token(own[-1])
            own = own[:-1]
        text = tokenizer.decode_after(context, own)
        self.messages.append({"role": ASSISTANT, "content": text})
        self._text += text + end_text
        self.answers += 1
        self.finish.append(answer.finish)

    def end(self, reason: str) -> None:
        """Ends the conversation before its next answer."""
        self.ended = reason

    def _add_user(self, answer: Written) -> None:
        if answer.finish != EOS:
            self.end("the user's turn has no end")
            return
        text = self.writer.tokenizer.decode_after(self.prompt(), answer.tokens[:-1])
        self.messages = [{"role": "user", "content": (self.question.opening + text).strip()}]

    def _close_row(self) -> None:
        """Ends the row that is being written, if it has an answer."""
        if any(self._mask):
            end = max(i for i, trained in enumerate(self._mask) if trained) + 1
            answered = [i for i, message in enumerate(self.messages) if is_answer(message)]
            count = answered[-1] + 1
            row = {"messages": self.messages[:count], IDS: self._ids[:end], MASK: self._mask[:end]}
            self.rows.append(row | {"finish_reason": list(self.finish)})
        self._ids = []
        self._mask = []

    def lines(self) -> list[dict[str, Any]]:
        """The objects that are written of a complete conversation; none without an answer."""
        self._close_row()
        about: dict[str, Any] = {"id": self.question.name}
        if self.question.tools:
            about["tools"] = self.question.tools
        drawn = {"temperature": self.question.temperature}
        return [about | row | drawn for row in self.rows]


def repeats_itself(tokens: Sequence[int]) -> bool:
    """Whether a text ends in the same tokens, four times or more and over its last quarter."""
    count = len(tokens)
    span = max(SHORTEST_REPEATED, count // 4)
    if count < span:
        return False
    last = list(tokens[count - span :])
    return any(last[period:] == last[:-period] for period in range(1, span // LEAST_TIMES + 1))
