"""Conversations as token ids, and which of these are trained.

The target's chat template renders a conversation. What it gives before an assistant's turn, with
the generation prompt, is context. What it adds with the turn is trained, up to the token that ends
the turn. So training sees what the model reads and writes when it answers, and no template needs
marks for it.

A template that only appends gives one row for all turns. One that rewrites what came before, such
as one that drops earlier thinking, gives a row for each answer.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from specjax import text
from specjax._util.errors import InputError, ModelError, SpecjaxError, errors_as, silence_failures
from specjax._util.files import read_file
from specjax.runtime.infill import leading_ids
from specjax.text.conversations import ASSISTANT, Conversation, read_conversation
from specjax.text.conversations import KEYS as CONVERSATION_KEYS
from specjax.text.tokenizer import read_chat_settings
from train.config import DataSection

IDS = "input_ids"  # of a record that is tokenized already
MASK = "loss_mask"  # beside them: 1 where a token is trained
RECORD_KEYS = (IDS, MASK, *CONVERSATION_KEYS)
NO_TEMPLATE = "the target has no chat template: set data.chat_template"


class ChatRow(NamedTuple):
    """A conversation, or a part of it, as one row.

    Attributes:
      text: what was rendered.
      ids: its token ids.
      mask: bool, whether each token is trained.
    """

    text: str
    ids: np.ndarray
    mask: np.ndarray


class Span(NamedTuple):
    """A part of a rendered text; ``answers``: whether the assistant has written it."""

    text: str
    answers: bool


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """How conversations become rows. Every process that reads a corpus has a copy.

    Attributes:
      tokenizer: its ``tokenizer.json``.
      template: the chat template, in Jinja; None: the target has none.
      special: the special tokens that the template may name.
      source: whose template it is; errors name it.
      options: further variables of the template.
      train_on: ``assistant``: all answers. ``last``: the last one. ``all``: every token.
      longest: tokens of a row; what is longer is cut. None: nothing is cut.
    """

    tokenizer: str
    template: str | None
    special: Mapping[str, str]
    source: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    train_on: str = ASSISTANT
    longest: int | None = None

    @property
    def fingerprint(self) -> str:
        """Changes whenever the rows of any conversation do, with the same tokenizer."""
        about = (self.template, sorted(self.special.items()), self.options, self.train_on)
        return hashlib.sha256(repr((*about, self.longest)).encode()).hexdigest()

    def rows(self, record: Mapping[str, Any]) -> list[ChatRow] | None:
        """The rows of a record, uncut; None if it is neither a conversation nor token ids.

        Raises:
          ValueError: the record is wrong, or the template refuses it.
        """
        if record.get(IDS) is not None and record.get(MASK) is not None:
            return [self._tokenized(record)]
        conversation = read_conversation(record)
        if conversation is None:
            return None
        if self.template is None:
            raise ValueError(NO_TEMPLATE)
        try:
            return [self._encode(spans) for spans in self.spans(conversation)]
        except SpecjaxError as error:
            raise ValueError(str(error)) from None

    def spans(self, conversation: Conversation) -> list[list[Span]]:
        """The rendered rows of a conversation, each as spans.

        Raises:
          ValueError: no turn is the assistant's, or the template does not write an answer after
            its own generation prompt.
          ModelError: the template fails.
        """
        messages = conversation.messages
        if self.train_on == "all":
            return [[Span(self.render(conversation, len(messages), False), True)]]
        turns = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not turns:
            raise ValueError("no turn is the assistant's")
        if self.train_on == "last":
            return [list(self._turn(conversation, turns[-1]))]

        rows = [self._turn(conversation, turn) for turn in turns]
        joined: list[Span] = []
        done = ""
        for before, answer in rows:
            if not before.text.startswith(done):
                return [list(row) for row in rows]  # the template rewrites what came before
            joined += [Span(before.text[len(done) :], False), answer]
            done = before.text + answer.text
        return [joined]

    def _turn(self, conversation: Conversation, turn: int) -> tuple[Span, Span]:
        """What is rendered before a turn of the assistant, and what the turn adds."""
        before = self.render(conversation, turn, True)
        after = self.render(conversation, turn + 1, False)
        if not after.startswith(before):
            raise ValueError(
                f"the chat template of {self.source} does not write an answer after its own "
                "generation prompt: set data.chat_template to one that does"
            )
        return Span(before, False), Span(after[len(before) :], True)

    def render(self, conversation: Conversation, count: int, prompt: bool) -> str:
        """The first ``count`` messages as text; with ``prompt``, up to an answer.

        Raises:
          ModelError: the template fails.
        """
        options = {**self.options, "add_generation_prompt": prompt}
        if conversation.tools:
            options["tools"] = conversation.tools
        return self._text.apply_chat(conversation.messages[:count], options)

    def cut(self, row: ChatRow) -> ChatRow:
        """The row's first ``longest`` tokens."""
        return row._replace(ids=row.ids[: self.longest], mask=row.mask[: self.longest])

    def _encode(self, spans: Sequence[Span]) -> ChatRow:
        """The ids of a row's text, and those that its answers are made of.

        Spans are encoded one by one: a model goes on from the ids of what is before its answer, so
        no token is a part of both, even where an answer begins with a line break.
        """
        ids: list[int] = []
        mask: list[bool] = []
        for span in spans:
            added = self.encode(span.text, inside=bool(ids))
            ids += added
            end = self._end_of_turn(added) if span.answers else 0
            mask += [place < end for place in range(len(added))]
        whole = "".join(span.text for span in spans)
        trained = np.array(mask, bool)
        if self.train_on == "all":
            trained[:] = True
        return ChatRow(whole, np.array(ids, np.int64), trained)

    def encode(self, rendered: str, inside: bool = False) -> list[int]:
        """The ids of a rendered text; ``inside``: of one that continues another.

        A template writes the special tokens itself, so none are added.

        Raises:
          InputError: the tokenizer cannot encode it.
        """
        failed = f"the tokenizer of {self.source} cannot encode a conversation"
        with errors_as(failed, InputError), silence_failures():
            lead = self._lead if inside else 0
            text = f"\n{rendered}" if lead else rendered
            encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids[lead:]

    def _end_of_turn(self, ids: Sequence[int]) -> int:
        """Where an answer ends: after its last special token, if only spaces follow that."""
        special = np.flatnonzero(np.isin(ids, self._special_ids))
        if not len(special):
            return len(ids)
        end = int(special[-1]) + 1
        return len(ids) if self._text.decode(list(ids[end:])).strip() else end

    def _tokenized(self, record: Mapping[str, Any]) -> ChatRow:
        ids = np.asarray(record[IDS])
        mask = np.asarray(record[MASK])
        whole = ids.dtype.kind in "iu" and mask.dtype.kind in "iub"
        if not whole or ids.ndim != 1 or ids.shape != mask.shape or not len(ids):
            raise ValueError(f'"{IDS}" and "{MASK}" must be lists of integers of one length')
        if ids.min() < 0 or ids.max() >= self._text.vocab_size:
            raise ValueError(f'"{IDS}": expected ids from 0 to {self._text.vocab_size - 1}')
        mask = mask != 0
        if self.train_on == "all":
            mask = np.ones_like(mask)
        elif self.train_on == "last" and mask.any():
            last = len(mask) - int(mask[::-1].argmax())  # where the last answer ends
            before = np.flatnonzero(~mask[:last])
            mask[: before[-1] + 1 if len(before) else 0] = False
        return ChatRow(self._text.decode_with_special(ids.tolist()), ids, mask)

    @functools.cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self.tokenizer)

    @functools.cached_property
    def _lead(self) -> int:
        """The number of :func:`leading_ids`: above 0 if a space is put before every text."""
        encode = self._backend.encode
        return len(leading_ids(lambda x: encode(x, add_special_tokens=False).ids))

    @functools.cached_property
    def _text(self) -> text.Tokenizer:
        return text.Tokenizer(self._backend, self.template, dict(self.special), self.source)

    @functools.cached_property
    def _special_ids(self) -> np.ndarray:
        added = self._backend.get_added_tokens_decoder()
        return np.array([i for i, token in added.items() if token.special], np.int64)

    def __getstate__(self) -> dict[str, Any]:
        """The attributes alone: another process makes its own tokenizer."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: vars(self)[name] for name in names}


def chat_format(data: DataSection, tokenizer: tokenizers.Tokenizer, home: Path) -> ChatFormat:
    """How the conversations of a config's corpus become rows.

    Args:
      home: the directory of the tokenizer, whose template is taken without ``data.chat_template``.

    Raises:
      InputError: the template cannot be read.
    """
    source = str(home)
    try:
        template, special = read_chat_settings(home)
    except ModelError as error:
        raise InputError(f"cannot read the chat template: {error}") from None
    if data.chat_template:
        source = data.chat_template
        template = read_template(source)
    return ChatFormat(
        tokenizer.to_str(),
        template,
        special,
        source,
        data.template_args,
        data.train_on,
        data.seq_len,
    )


def read_template(path: str, option: str = "data.chat_template") -> str:
    """The text of a template's file; raises InputError if it cannot be read."""
    try:
        return read_file(path).decode()
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be read ({error.strerror})") from None
    except UnicodeError:
        raise InputError(f"{option} {path}: it is not UTF-8") from None


def has_answer(row: ChatRow) -> bool:
    """Whether anything of the row is trained: a token but the first, which nothing predicts."""
    return bool(row.mask[1:].any())
