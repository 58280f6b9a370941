"""Prompts as token ids: a text, a conversation, a text's middle, and JSONL files of them.

Keys follow the prompt's index in its file, so a resumed job equals an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from infer.formats import Message, plain, read_case
from specjax.errors import OptionError
from specjax.files import parse_json, read_file
from specjax.generate import encode_prompt
from specjax.infill import infill_prompt
from specjax.lm import LM
from specjax.rewards import Reward

SURROGATE = re.compile("[\ud800-\udfff]")
ID_KEYS = ("id", "question_id", "task_id")  # ours, Spec-Bench's, HumanEval's


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt of a job. ``index`` counts the file's good and bad lines alike; ``entry`` is the
    line's whole object."""

    index: int
    id: str | int
    text: str
    tokens: list[int]
    entry: dict[str, Any]
    constraints: dict[str, list[str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class BadLine:
    """An input line that cannot be decoded; ``number`` counts from 1."""

    number: int
    reason: str


def read_prompts(
    path: str, target: LM, chat: bool, rewards: Sequence[Reward] | None = None
) -> tuple[list[Prompt], list[BadLine]]:
    """The prompts of a JSONL file and the lines that hold none.

    With ``rewards`` the file is a task: its lines have constraints, which these can score.

    Raises:
      OptionError: the file cannot be read or holds no line at all.
    """
    option = "--prompts" if rewards is None else "--task"
    try:
        # Bytes: text would also split at U+2028 and the like, which JSON allows in strings,
        # and one undecodable line would spoil the file.
        lines = read_file(path, pipes=True).splitlines()
    except OSError as error:
        raise OptionError(f"{option} {path}: cannot be read ({error.strerror})") from None
    if not any(line.strip() for line in lines):
        raise OptionError(f"{option} {path}: the file is empty; it needs one JSON object per line")
    good, bad = [], []
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            good.append(_prompt(index, _object(line), target, chat, rewards))
        except ValueError as error:
            bad.append(BadLine(index + 1, str(error)))
    return good, bad


def _object(line: bytes) -> dict[str, Any]:
    entry = parse_json(line)
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, got {type(entry).__name__}")
    return entry


def _prompt(
    index: int, entry: dict[str, Any], target: LM, chat: bool, rewards: Sequence[Reward] | None
) -> Prompt:
    """A line's prompt: of a task (see :mod:`infer.formats`), a middle to fill in, or a text."""
    name = next((entry[key] for key in ID_KEYS if key in entry), index)
    if type(name) not in (str, int) or SURROGATE.search(str(name)):
        raise ValueError('"id" must be a text of whole characters, or an integer')
    constraints: dict[str, list[str]] = {}
    if rewards is not None:
        asked, constraints = read_case(entry)
        for reward in rewards:
            reward.check(target.tokenizer, [constraints])
        text = asked if isinstance(asked, str) else plain(asked)
        tokens = encode(target, asked if chat else text, chat)
    elif "prefix" in entry or "suffix" in entry:
        text, suffix = entry.get("prefix"), entry.get("suffix")
        if not isinstance(text, str) or not isinstance(suffix, str):
            raise ValueError('expected texts under "prefix" and "suffix"')
        tokens = encode_infilling(target, text, suffix)
    else:
        text, turns = entry.get("prompt"), entry.get("turns")
        if text is None and isinstance(turns, list) and turns:
            text = turns[0]  # of Spec-Bench's questions the first turn is the prompt
        if not isinstance(text, str):
            raise ValueError('expected a text under "prompt"')
        tokens = encode(target, text, chat)
    return Prompt(index, name, text, tokens, entry, constraints)


def encode_infilling(target: LM, prefix: str, suffix: str) -> list[int]:
    """Token ids that ask for the text between the two, with the model's own sentinels.

    Raises:
      OptionError: as for :func:`encode`.
      PairError: the model has no sentinels.
    """
    return list(encode_prompt(target, infill_prompt(target, prefix, suffix)))


def encode(target: LM, text: str | list[Message], chat: bool) -> list[int]:
    """A prompt's token ids; with ``chat`` through the model's template, messages or a text.

    Raises:
      OptionError: the text is empty, too long, or holds half of a surrogate pair (JSON escapes
        can), which no tokenizer takes.
    """
    if chat:
        rendered = target.tokenizer.apply_chat(text)
        return list(encode_prompt(target, target.tokenizer.encode(rendered, False)))
    return list(encode_prompt(target, text))
