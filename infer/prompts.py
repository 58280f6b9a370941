"""Prompts as token ids: a text, a conversation, a text's middle, and JSONL files of them.

A text that is too long can lose its beginning (``--truncate left``). Keys follow the prompt's
index in its file, so a resumed job equals an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from infer.datasets.table import Source
from infer.formats import Message, json_objects, plain, read_case
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
class PromptEncoder:
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

    def text(self, text: str | list[Message], first: int | None = None) -> tuple[list[int], int]:
        """The ids of a text, or of a conversation with ``chat``, and how many were cut.

        ``first``: its first ids alone, which is no cut.

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
        tokens = tokens[:first]
        kept = self._end(tokens) if self.truncate else tokens
        return self._checked(kept), len(tokens) - len(kept)

    def rest(self, text: str, first: int) -> str:
        """What follows a text's ``first`` ids, as much of it as the new tokens may be."""
        tokenizer = self.target.tokenizer
        return tokenizer.decode(tokenizer.encode(text)[first:][: self.new_tokens])

    def middle(self, prefix: str, suffix: str, order: str = PSM) -> list[int]:
        """The ids that ask for the text between the two, with the model's own sentinels.

        Raises:
          OptionError: as for :meth:`text`.
          PairError: the model has no sentinels.
        """
        return self._checked(infill_prompt(self.target, prefix, suffix, order))

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


def references_of(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts under ``references`` or ``reference``; of Spec-Bench's list the first turn's."""
    known = entry.get("references", entry.get("reference"))
    if isinstance(known, list) and "turns" in entry:
        known = known[:1]
    known = known if isinstance(known, list) else [known]
    return tuple(text for text in known if isinstance(text, str))


def stops_of(entries: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The texts that end the completions of a dataset, each once."""
    return tuple(dict.fromkeys(text for entry in entries for text in entry.get("stop") or ()))


def report(program: str, prompts: Sequence[Prompt], bad: Sequence[BadLine] = (), path="") -> None:
    """Says which lines are skipped, one line each, and how many prompts were cut."""
    for line in bad:
        say(program, f"{path} line {line.number}: {line.reason}")
    cut = [prompt.cut for prompt in prompts if prompt.cut]
    if cut:
        said = f"{len(cut)} of {len(prompts)} prompts lost their first tokens, {max(cut)} at most"
        say(program, f"--truncate left: {said}")


def read_prompts(
    path: str,
    encoder: PromptEncoder,
    rewards: Sequence[Reward] | None = None,
    source: Source | None = None,
    most: int | None = None,
) -> tuple[list[Prompt], list[BadLine]]:
    """The first ``most`` prompts of a JSONL file, or of a dataset's, and the lines that hold none.

    With ``rewards`` the file is a task: its lines have constraints, which these can score.

    Raises:
      OptionError: the file cannot be read or holds no line at all, or is none of the dataset.
    """
    option = "--prompts" if rewards is None else "--task"
    good: list[Prompt] = []
    bad: list[BadLine] = []
    for index, entry in enumerate(source.read(path)) if source else _lines(path, option):
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
    """A line's prompt: of a task (see :mod:`infer.formats`), a middle to fill in, or a text.

    None of a text that ends where its continuation should begin.
    """
    name = next((entry[key] for key in ID_KEYS if key in entry), index)
    if type(name) not in (str, int) or SURROGATE.search(str(name)):
        raise ValueError('"id" must be a text of whole characters, or an integer')
    constraints: dict[str, list[str]] = {}
    if rewards is None and ("prefix" in entry or "suffix" in entry):
        text, suffix = entry.get("prefix"), entry.get("suffix")
        if not isinstance(text, str) or not isinstance(suffix, str):
            raise ValueError('expected texts under "prefix" and "suffix"')
        tokens = encoder.middle(text, suffix, entry.get("order", PSM))
        yield Prompt(index, name, text, tokens, entry)
        return
    if rewards is not None or "messages" in entry:
        asked, constraints = read_case(entry, encoder.chat)
        for reward in rewards or ():
            reward.check(encoder.target.tokenizer, [constraints])
    else:
        asked = _turn(entry, encoder)
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
    yield Prompt(index, name, text, tokens, entry, constraints, cut)


def _turn(entry: Entry, encoder: PromptEncoder) -> str | list[Message]:
    """What a line asks for.

    Of Spec-Bench's questions the first turn is the prompt; of MT-Bench's second turns, which say
    so, both, the first answered by the target, greedily: every method goes on from there.
    """
    text, turns = entry.get("prompt"), entry.get("turns")
    if entry.get("turn") == 2:
        if not isinstance(turns, list) or list(map(type, turns[:2])) != [str, str]:
            raise ValueError('a second turn needs two texts under "turns"')
        tokens, _ = encoder.text(turns[0])
        answer = generate(encoder.target, [tokens], max_new_tokens=encoder.new_tokens).text[0]
        said = zip(("user", "assistant", "user"), (turns[0], answer, turns[1]), strict=True)
        return [{"role": role, "content": content} for role, content in said]
    if text is None and isinstance(turns, list) and turns:
        text = turns[0]
    if not isinstance(text, str):
        raise ValueError('expected a text under "prompt"')
    return text
