"""Batch jobs: prompts from JSONL, one finished row per line, restartable after a kill.

A row is appended and synced before the next batch starts; a started-again job truncates a torn
last line and does what is missing. Keys follow the prompt's index in the job, so a resumed job
equals an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from infer.formats import plain, read_case
from specjax.errors import OptionError, SpecjaxError
from specjax.generate import encode_prompt
from specjax.infill import infill_prompt
from specjax.lm import LM
from specjax.rewards import Reward

ID_KEYS = ("id", "question_id", "task_id")  # ours, Spec-Bench's, HumanEval's


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt of a job. ``index`` counts the file's good and bad lines alike; ``entry`` is the
    line's whole object."""

    index: int
    id: str | int
    text: str
    tokens: list[int]
    entry: dict
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
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise OptionError(f"{option} {path}: cannot be read ({error.strerror})") from None
    if not any(line.strip() for line in lines):
        raise OptionError(f"{option} {path}: the file is empty; it needs one JSON object per line")
    good, bad = [], []
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            good.append(_prompt(index, line, target, chat, rewards))
        except (SpecjaxError, ValueError) as error:
            bad.append(BadLine(index + 1, str(error)))
    return good, bad


def _prompt(
    index: int, line: bytes, target: LM, chat: bool, rewards: Sequence[Reward] | None
) -> Prompt:
    try:
        entry = json.loads(line.decode())
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg})") from None
    except RecursionError:
        raise ValueError("not JSON of a reasonable depth") from None
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, got {type(entry).__name__}")
    name = next((entry[key] for key in ID_KEYS if key in entry), index)
    if not isinstance(name, (str, int)):
        raise ValueError('"id" must be a text or an integer')
    if rewards is not None:
        return _case(index, name, entry, target, chat, rewards)
    if "prefix" in entry or "suffix" in entry:
        return _infilling(index, name, entry, target)
    text = entry.get("prompt")
    turns = entry.get("turns")  # Spec-Bench's questions: the first turn is the prompt
    if text is None and isinstance(turns, list) and turns:
        text = turns[0]
    if not isinstance(text, str):
        raise ValueError('expected a text under "prompt"')
    return Prompt(index, name, text, encode(target, text, chat), entry)


def _infilling(index, name, entry, target: LM) -> Prompt:
    """A line with a text's parts, whose middle is asked for."""
    parts = [entry.get(part) for part in ("prefix", "suffix")]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError('expected texts under "prefix" and "suffix"')
    return Prompt(index, name, parts[0], encode_infilling(target, *parts), entry)


def encode_infilling(target: LM, prefix: str, suffix: str) -> list[int]:
    """Token ids that ask for the text between the two, with the model's own sentinels.

    Raises:
      OptionError: as for :func:`encode`.
      PairError: the model has no sentinels.
    """
    _check_characters(prefix + suffix)
    return list(encode_prompt(target, infill_prompt(target, prefix, suffix)))


def _case(index, name, entry, target: LM, chat: bool, rewards: Sequence[Reward]) -> Prompt:
    """A line of a task; see :mod:`infer.formats`."""
    asked, constraints = read_case(entry)
    for reward in rewards:
        reward.check(target.tokenizer, [constraints])
    text = asked if isinstance(asked, str) else plain(asked)
    tokens = encode(target, asked if chat else text, chat)
    return Prompt(index, name, text, tokens, entry, constraints)


def encode(target: LM, text: str | list[dict[str, str]], chat: bool) -> list[int]:
    """A prompt's token ids; with ``chat`` through the model's template, messages or a text.

    Raises:
      OptionError: the text is empty, too long, or holds half of a surrogate pair (JSON escapes
        can), which no tokenizer takes.
    """
    _check_characters(text if isinstance(text, str) else plain(text))
    if chat:
        rendered = target.tokenizer.apply_chat(text)
        return list(encode_prompt(target, target.tokenizer.encode(rendered, False)))
    return list(encode_prompt(target, text))


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OptionError(
            "a prompt holds half of a surrogate pair; give whole characters"
        ) from None


class Output:
    """The result file: knows what is done and appends what is not."""

    def __init__(self, path: str, settings: dict[str, object]):
        self._path = Path(path)
        self._settings = settings
        self._check_writable()
        self.done = set(self._finished())

    def _check_writable(self) -> None:
        try:
            self._path.open("ab").close()
        except OSError as error:
            raise OptionError(f"--out {self._path}: cannot be written ({error.strerror})") from None

    def _finished(self) -> Iterator[tuple[int, int]]:
        """(index, sample) of each whole line; a torn last line is cut off the file.

        Raises:
          OptionError: the file was written by a job with other settings, or is no result file.
        """
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                yield entry["index"], entry["sample"]
            except (ValueError, KeyError, TypeError):
                raise OptionError(
                    f"--out {self._path}: line {number} is no result of this "
                    "program; choose another file"
                ) from None
            for name, value in self._settings.items():
                if entry.get(name) != value:
                    raise OptionError(
                        f"--out {self._path}: was written with {name}={entry.get(name)!r}, this "
                        f"job has {value!r}; choose another file"
                    )
        if len(whole) < len(data):
            with self._path.open("r+b") as file:
                file.truncate(len(whole))
                os.fsync(file.fileno())

    def append(self, entry: dict) -> None:
        """Writes one row in one piece and returns once it is on disk."""
        line = (json.dumps(entry, ensure_ascii=False) + "\n").encode()
        with self._path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
