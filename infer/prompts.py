"""Prompts as token ids: a text, a conversation, a text's middle, and JSONL files of them.

A text that is too long can lose its beginning (``--truncate left``). Keys follow the prompt's
index in its file, so a resumed job equals an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from infer.formats import Message, plain, read_case
from specjax.errors import OptionError
from specjax.files import parse_json, read_file
from specjax.generate import check_draft_context, encode_prompt
from specjax.infill import infill_prompt
from specjax.lm import LM
from specjax.program import say
from specjax.rewards import Reward

SURROGATE = re.compile("[\ud800-\udfff]")
ID_KEYS = ("id", "question_id", "task_id")  # ours, Spec-Bench's, HumanEval's


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt of a job. ``index`` counts the file's good and bad lines alike; ``entry`` is the
    line's whole object; ``cut`` says how many of its tokens were left out."""

    index: int
    id: str | int
    text: str
    tokens: list[int]
    entry: dict[str, Any]
    constraints: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    cut: int = 0


@dataclasses.dataclass(frozen=True)
class BadLine:
    """An input line that cannot be decoded; ``number`` counts from 1."""

    number: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Encoder:
    """How prompts become token ids, and what these must fit into.

    Args:
      draft: one whose context must hold the prompt and ``new_tokens``, too.
      chat: through the target's template.
      truncate: texts lose their first tokens where the rest and ``new_tokens`` fill a context.
    Raises:
      OptionError: with ``truncate``, the new tokens alone fill it.
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

    def text(self, text: str | list[Message]) -> tuple[list[int], int]:
        """The ids of a text, or of a conversation with ``chat``, and how many were cut.

        Raises:
          OptionError: the text is empty, too long, or holds half of a surrogate pair (JSON
            escapes can), which no tokenizer takes.
          ModelError: the model has no chat template.
        """
        tokenizer = self.target.tokenizer
        if self.chat:
            tokens = tokenizer.encode(tokenizer.apply_chat(text), False)
        else:
            tokens = tokenizer.encode(text)
        kept = self._end(tokens) if self.truncate else tokens
        return self._checked(kept), len(tokens) - len(kept)

    def middle(self, prefix: str, suffix: str) -> list[int]:
        """The ids that ask for the text between the two, with the model's own sentinels.

        Raises:
          OptionError: as for :meth:`text`.
          PairError: the model has no sentinels.
        """
        return self._checked(infill_prompt(self.target, prefix, suffix))

    @property
    def _room(self) -> int:
        """Tokens that a prompt may have."""
        models = (self.target, self.draft) if self.draft else (self.target,)
        return min(model.config.max_position for model in models) - self.new_tokens

    def _end(self, tokens: list[int]) -> list[int]:
        """The last tokens that there is room for, after BOS where a prompt begins with it."""
        bos = [token for token in tokens[:1] if token == self.target.config.bos_id]
        over = len(tokens) - self._room
        return [*bos, *tokens[len(bos) + over :]] if over > 0 else tokens

    def _checked(self, tokens: list[int]) -> list[int]:
        ids = list(encode_prompt(self.target, tokens))
        if self.draft:
            budget = min(self.new_tokens, self.target.config.max_position - len(ids))
            check_draft_context(self.draft, len(ids), budget)
        return ids


def report(program: str, prompts: Sequence[Prompt], bad: Sequence[BadLine] = (), path="") -> None:
    """Says which lines are skipped, one line each, and how many prompts were cut."""
    for line in bad:
        say(program, f"{path} line {line.number}: {line.reason}")
    cut = [prompt.cut for prompt in prompts if prompt.cut]
    if cut:
        said = f"{len(cut)} of {len(prompts)} prompts lost their first tokens, {max(cut)} at most"
        say(program, f"--truncate left: {said}")


def read_prompts(
    path: str, encoder: Encoder, rewards: Sequence[Reward] | None = None
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
            good.append(_prompt(index, _object(line), encoder, rewards))
        except ValueError as error:
            bad.append(BadLine(index + 1, str(error)))
    return good, bad


def _object(line: bytes) -> dict[str, Any]:
    entry = parse_json(line)
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, got {type(entry).__name__}")
    return entry


def _prompt(
    index: int, entry: dict[str, Any], encoder: Encoder, rewards: Sequence[Reward] | None
) -> Prompt:
    """A line's prompt: of a task (see :mod:`infer.formats`), a middle to fill in, or a text."""
    name = next((entry[key] for key in ID_KEYS if key in entry), index)
    if type(name) not in (str, int) or SURROGATE.search(str(name)):
        raise ValueError('"id" must be a text of whole characters, or an integer')
    constraints: dict[str, list[str]] = {}
    cut = 0
    if rewards is not None:
        asked, constraints = read_case(entry)
        for reward in rewards:
            reward.check(encoder.target.tokenizer, [constraints])
        text = asked if isinstance(asked, str) else plain(asked)
        tokens, cut = encoder.text(asked if encoder.chat else text)
    elif "prefix" in entry or "suffix" in entry:
        text, suffix = entry.get("prefix"), entry.get("suffix")
        if not isinstance(text, str) or not isinstance(suffix, str):
            raise ValueError('expected texts under "prefix" and "suffix"')
        tokens = encoder.middle(text, suffix)
    else:
        text, turns = entry.get("prompt"), entry.get("turns")
        if text is None and isinstance(turns, list) and turns:
            text = turns[0]  # of Spec-Bench's questions the first turn is the prompt
        if not isinstance(text, str):
            raise ValueError('expected a text under "prompt"')
        tokens, cut = encoder.text(text)
    return Prompt(index, name, text, tokens, entry, constraints, cut)
