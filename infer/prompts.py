"""Prompts as token ids: texts, conversations, infilling prompts, and JSONL files of them.

A text that is too long can lose its beginning (``--truncate left``). A prompt's random key depends
on its index in the file, so a resumed job gives the same text as an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from infer.datasets.table import Source
from infer.formats import Message, json_objects, of_batch, plain, read_case
from specjax._util.errors import OptionError
from specjax._util.files import read_file
from specjax._util.program import say
from specjax.lm import LM
from specjax.rewards import Reward
from specjax.runtime.generate import check_draft_context, encode_prompt, generate
from specjax.runtime.infill import PSM, infill_prompt

SURROGATE = re.compile("[\ud800-\udfff]")
Entry = dict[str, Any]
ID_KEYS = ("id", "question_id", "task_id")  # ours, Spec-Bench's, HumanEval's


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt of a job.

    Args:
      index: of the line in its file; bad lines count, too.
      text: the prompt as text; of an infilling prompt the prefix.
      entry: the whole object of the line.
      cut: how many tokens ``--truncate left`` cut off.
      without_template: it is a conversation, and the model's chat template was not used.
    """

    index: int
    id: str | int
    text: str
    tokens: list[int]
    entry: dict[str, Any]
    constraints: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    cut: int = 0
    without_template: bool = False


@dataclasses.dataclass(frozen=True)
class BadLine:
    """An input line that cannot be decoded; ``number`` counts from 1."""

    number: int
    reason: str


@dataclasses.dataclass(frozen=True)
class PromptEncoder:
    """Turns prompts into token ids, and checks that they fit into the models' contexts.

    Args:
      draft: its context must hold the prompt and ``new_tokens``, too.
      chat: use the target's chat template.
      truncate: cut the first tokens of texts that leave no room for ``new_tokens``.

    Raises:
      OptionError: with ``truncate``, the new tokens alone fill the context.
    """

    target: LM
    draft: LM | None = None
    new_tokens: int = 1
    chat: bool = False
    truncate: bool = False

    def __post_init__(self):
        if self.truncate and self._room < 2:
            raise OptionError(
                f"--truncate left: {self.new_tokens} new tokens leave no room for a prompt in a "
                f"context of {self._room + self.new_tokens}; lower --max-new-tokens"
            )

    def text(self, text: str | list[Message], first: int | None = None) -> tuple[list[int], int]:
        """The ids of a text, or with ``chat`` of a conversation, and how many were cut off.

        ``first``: use only so many ids; the others do not count as cut off.

        Raises:
          OptionError: the text is empty, too long, or has half of a surrogate pair. JSON can
            escape one, but tokenizers need valid Unicode.
          ModelError: the model has no chat template.
        """
        tokenizer = self.target.tokenizer
        if self.chat:
            tokens = tokenizer.encode_chat(text)
        else:
            tokens = tokenizer.encode(text)
        tokens = tokens[:first]
        kept = tokens
        if self.truncate:
            kept = self._end(tokens)
        return self._checked(kept), len(tokens) - len(kept)

    def rest(self, text: str, first: int) -> str:
        """The text after the ``first`` ids, up to ``new_tokens`` tokens of it."""
        tokenizer = self.target.tokenizer
        tokens = tokenizer.encode(text)
        return tokenizer.decode_after(tokens[:first], tokens[first:][: self.new_tokens])

    def middle(self, prefix: str, suffix: str, order: str = PSM) -> list[int]:
        """The ids of an infilling prompt, which asks for the text between prefix and suffix.

        Raises:
          OptionError: as for :meth:`text`.
          PairError: the model has no infilling tokens.
        """
        return self._checked(infill_prompt(self.target, prefix, suffix, order))

    @property
    def _room(self) -> int:
        """The longest prompt, in tokens."""
        context = self.target.config.max_position
        if self.draft:
            context = min(context, self.draft.config.max_position)
        return context - self.new_tokens

    def _end(self, tokens: list[int]) -> list[int]:
        """The last tokens that fit; a BOS at the beginning stays."""
        over = len(tokens) - self._room
        if over <= 0:
            return tokens
        bos = [token for token in tokens[:1] if token == self.target.config.bos_id]
        return [*bos, *tokens[len(bos) + over :]]

    def _checked(self, tokens: list[int]) -> list[int]:
        ids = list(encode_prompt(self.target, tokens))
        if self.draft:
            budget = min(self.new_tokens, self.target.config.max_position - len(ids))
            check_draft_context(self.draft, len(ids), budget)
        return ids


def references_of(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts under ``references`` or ``reference``.

    Spec-Bench has one reference per turn; only the first turn is decoded.
    """
    references = entry.get("references", entry.get("reference"))
    if not isinstance(references, list):
        references = [references]
    elif "turns" in entry:
        references = references[:1]
    return tuple(text for text in references if isinstance(text, str))


def stops_of(entries: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """All stop strings of a dataset's entries, each once and in order."""
    stops = [text for entry in entries for text in entry.get("stop") or ()]
    return tuple(dict.fromkeys(stops))


def report(program: str, prompts: Sequence[Prompt], bad: Sequence[BadLine] = (), path="") -> None:
    """Says on stderr which lines are skipped, and how many prompts were cut."""
    for line in bad:
        say(program, f"{path} line {line.number}: {line.reason}")
    cuts = [prompt.cut for prompt in prompts if prompt.cut]
    if cuts:
        counts = f"{len(cuts)} of {len(prompts)} prompts lost their first tokens"
        say(program, f"--truncate left: {counts}, {max(cuts)} at most")
    plain_chats = sum(prompt.without_template for prompt in prompts)
    if plain_chats:
        say(
            program, f"{plain_chats} conversations are plain text: --chat uses the model's template"
        )


def read_prompts(
    path: str,
    encoder: PromptEncoder,
    rewards: Sequence[Reward] | None = None,
    source: Source | None = None,
    most: int | None = None,
    option: str = "--prompts",
) -> tuple[list[Prompt], list[BadLine]]:
    """The first ``most`` prompts of a JSONL file or a dataset, and the lines that are wrong.

    With ``rewards`` the file is a task. Its lines have constraints, which the rewards score.
    Errors name the file by ``option``, as the command line does.

    Raises:
      OptionError: the file cannot be read, is empty, or is not of the dataset ``source``.
    """
    good: list[Prompt] = []
    bad: list[BadLine] = []
    if source:
        lines = enumerate(source.read(path))
    else:
        lines = _lines(path, option)
    for index, entry in lines:
        if len(good) == most:
            break
        try:
            if isinstance(entry, ValueError):
                raise entry
            good += _prompt(index, entry, encoder, rewards)
        except ValueError as error:
            bad.append(BadLine(index + 1, str(error)))
    return good, bad


def _lines(path: str, option: str) -> Iterator[tuple[int, Entry | ValueError]]:
    try:
        data = read_file(path, pipes=True)
    except OSError as error:
        raise OptionError(f"{option} {path}: cannot be read ({error.strerror})") from None
    if not data.strip():
        raise OptionError(f"{option} {path}: the file is empty; it needs one JSON object per line")
    return json_objects(data)


def _prompt(
    index: int, entry: Entry, encoder: PromptEncoder, rewards: Sequence[Reward] | None
) -> Iterator[Prompt]:
    """A line's prompt: of a task (:mod:`infer.formats`), for infilling, or a text.

    Yields nothing if a dataset's text ends where its continuation should begin.

    Raises:
      ValueError: the line is wrong; the message says what was expected.
    """
    entry = of_batch(entry) or entry
    name = next((entry[key] for key in ID_KEYS if key in entry), index)
    if type(name) not in (str, int) or SURROGATE.search(str(name)):
        raise ValueError('"id" must be a text of whole characters, or an integer')
    if rewards is None and ("prefix" in entry or "suffix" in entry):
        yield _infilling_prompt(index, name, entry, encoder)
        return

    constraints: dict[str, list[str]] = {}
    if rewards is not None or "messages" in entry or "conversations" in entry:
        asked, constraints = read_case(entry, encoder.chat)
        for reward in rewards or ():
            reward.check(encoder.target.tokenizer, [constraints])
    else:
        asked = _text_or_turns(entry, encoder)

    first = entry.get("first_tokens")
    if first is not None and (type(first) is not int or first < 1):
        raise ValueError('"first_tokens" must be a whole number from 1')
    text = asked if isinstance(asked, str) else plain(asked)
    tokens, cut = encoder.text(asked if encoder.chat else text, first)

    if first and "references" not in entry:
        rest = encoder.rest(text, first)
        if not rest:
            return
        entry = entry | {"references": [rest]}
    if first:
        text = encoder.target.tokenizer.decode(tokens)
    has_template = encoder.target.tokenizer is not None and encoder.target.tokenizer.chats
    without_template = isinstance(asked, list) and has_template and not encoder.chat
    yield Prompt(index, name, text, tokens, entry, constraints, cut, without_template)


def _infilling_prompt(index: int, name: str | int, entry: Entry, encoder: PromptEncoder) -> Prompt:
    prefix = entry.get("prefix")
    suffix = entry.get("suffix")
    if not isinstance(prefix, str) or not isinstance(suffix, str):
        raise ValueError('expected texts under "prefix" and "suffix"')
    tokens = encoder.middle(prefix, suffix, entry.get("order", PSM))
    return Prompt(index, name, prefix, tokens, entry)


def _text_or_turns(entry: Entry, encoder: PromptEncoder) -> str | list[Message]:
    """The prompt of a line: its text, or the turns of a conversation.

    Of Spec-Bench's questions the prompt is the first turn. An entry of MT-Bench with ``"turn": 2``
    asks both turns. The target answers the first one, greedily, so that every method continues
    the same conversation.
    """
    text = entry.get("prompt")
    turns = entry.get("turns")
    if entry.get("turn") == 2:
        if not isinstance(turns, list) or list(map(type, turns[:2])) != [str, str]:
            raise ValueError('a second turn needs two texts under "turns"')
        tokens, _ = encoder.text(turns[0])
        answer = generate(encoder.target, [tokens], max_new_tokens=encoder.new_tokens).text[0]
        return [
            {"role": "user", "content": turns[0]},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": turns[1]},
        ]
    if text is None and isinstance(turns, list) and turns:
        text = turns[0]
    if not isinstance(text, str):
        raise ValueError('expected a text under "prompt"')
    return text
