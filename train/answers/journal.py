"""What a killed run goes on from: a file of answers beside the output, one line each.

A process appends to a part of its own (:mod:`specjax._util.parts`). The first line says what the
answers depend on. A conversation that is complete has a line with its rows. The process that finds
all conversations complete joins the parts into the output, in the order of the questions.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specjax._util.appending import AppendedFile, may_begin
from specjax._util.errors import InputError, errors_as
from specjax._util.files import (
    aside,
    cut_incomplete_line,
    json_line,
    locked,
    open_file,
    parse_json,
)
from specjax._util.parts import file_to_append, part_files, remove_parts
from specjax._util.program import Place
from train.answers.dialogue import Written

SETTINGS = "settings"  # of a part's first line
INDEX = "index"  # the number of a question
TURN = "turn"  # an answer's number in its conversation
LINES = "lines"  # what is written of a complete conversation
COUNTS = "counts"  # of its answers
BEGINS = (f'{{"{SETTINGS}": ', f'{{"{INDEX}": ')  # of a part's lines
COMPLETE = "exists already and is complete; choose another OUT"
MOVE = "move it and start again, or choose another OUT"


class AnswerJournal:
    """The answers that are on disk.

    Attributes:
      answers: of conversations that are not complete: by question, in order.
      complete: the numbers of complete conversations.

    Raises:
      InputError: the output is there, or a part was written with other settings, or is none.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any], place: Place):
        self._out = out
        self._settings = settings
        self._file = file_to_append(str(out), place)
        self.complete: set[int] = set()
        # Another number of processes may have gone on with a conversation in a part of its own.
        found: dict[int, dict[int, Written]] = collections.defaultdict(dict)
        for entry in self._entries():
            if LINES in entry:
                self.complete.add(entry[INDEX])
            else:
                turns = found[entry[INDEX]]
                turn = entry.get(TURN, len(turns))
                turns.setdefault(turn, Written(entry["tokens"], entry["finish"]))
        self.answers = {
            index: [turns[turn] for turn in sorted(turns)]
            for index, turns in found.items()
            if index not in self.complete
        }
        self._turns = collections.Counter({i: len(turns) for i, turns in self.answers.items()})
        self._leave_output()
        cut_incomplete_line(self._file)
        self._appended = AppendedFile(self._file, str(out), "answers", InputError)

    def add(self, index: int, answer: Written) -> None:
        """Notes an answer; returns once it is on disk."""
        turn = self._turns[index]
        self._append({INDEX: index, TURN: turn, "tokens": answer.tokens, "finish": answer.finish})
        self._turns[index] += 1

    def finish(self, index: int, lines: list[dict[str, Any]], counts: Mapping[str, int]) -> None:
        """Notes that a conversation is complete."""
        self._append({INDEX: index, LINES: lines, COUNTS: dict(counts)})
        self.complete.add(index)
        self.answers.pop(index, None)

    def join(self, count: int) -> dict[str, int] | None:
        """Writes the output if all conversations are complete; None while some are missing.

        Args:
          count: how many conversations there are.

        Returns:
          The sums of what was counted.

        Raises:
          InputError: somebody else has changed this process's part, or has made the output.
        """
        with locked(self._out, "OUT", math.inf):
            # Another process that found all complete has removed all parts, this one's too.
            if self._file.exists() or not self._out.exists():
                self._appended.check_unchanged()
            done = self._complete_entries()
            if len(done) < count:
                return None
            if self._out.exists() and not self._is_joined(done):
                raise InputError(f"{self._out} is there, and not of this job: {MOVE}")
            with aside(self._out) as scratch, scratch.open("wb") as file:
                file.writelines(_lines_of(done))
                file.flush()
                os.fsync(file.fileno())
            remove_parts(str(self._out))
        sums: collections.Counter[str] = collections.Counter()
        for entry in done.values():
            sums.update(entry[COUNTS])
        return dict(sums)

    def _complete_entries(self) -> dict[int, dict[str, Any]]:
        """The entries of complete conversations in all parts, by question and in order."""
        done = {entry[INDEX]: entry for entry in self._entries() if LINES in entry}
        return dict(sorted(done.items()))

    def _leave_output(self) -> None:
        """Raises InputError if the output is there; removes parts that it was joined from."""
        with locked(self._out, "OUT", math.inf):
            if not self._out.exists():
                return
            if part_files(str(self._out)) and not self._is_joined(self._complete_entries()):
                raise InputError(f"{self._out} is there, beside answers of another file: {MOVE}")
            remove_parts(str(self._out))
        raise InputError(f"{self._out} {COMPLETE}")

    def _is_joined(self, done: Mapping[int, dict[str, Any]]) -> bool:
        """Whether the output has been joined from parts, which a killed process has not removed.

        It may have removed some. The output has the lines of the others, in their order.
        """
        with errors_as(f"{self._out}: cannot be read", InputError), open_file(self._out) as file:
            lines = iter(file)
            found = [line in lines for line in _lines_of(done)]
        return bool(found) and all(found)

    def _append(self, entry: dict[str, Any]) -> None:
        lines = [entry]
        # The settings come with the first answer, so that a refused job leaves no file behind.
        if not self._file.exists() or not self._file.stat().st_size:
            lines.insert(0, {SETTINGS: dict(self._settings)})
        self._appended.append("\n".join(map(json.dumps, lines)))

    def _entries(self) -> Iterator[dict[str, Any]]:
        """The entries of all parts, but their settings, which are checked."""
        for path in part_files(str(self._out)):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                for number, line in enumerate(file):
                    if not line.endswith(b"\n") and may_begin(line, *BEGINS):
                        break  # another process is writing it, or was killed
                    entry = self._parsed(path, line)
                    if number == 0:
                        self._check(path, entry)
                    else:
                        yield entry

    def _parsed(self, path: Path, line: bytes) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            entry = parse_json(line)
            if isinstance(entry, dict) and (SETTINGS in entry or INDEX in entry):
                return entry
        raise InputError(f"{path} is no part of this program: remove it, or choose another OUT")

    def _check(self, path: Path, entry: dict[str, Any]) -> None:
        stored = entry.get(SETTINGS, {})
        for name, value in json.loads(json.dumps(dict(self._settings))).items():
            if stored.get(name) != value:
                raise InputError(
                    f"{path} was written with {name}={stored.get(name)!r}, now it is {value!r}: "
                    "set it back, or choose another OUT"
                )


def _lines_of(done: Mapping[int, dict[str, Any]]) -> Iterator[bytes]:
    """The output's lines of complete conversations."""
    for entry in done.values():
        for line in entry[LINES]:
            yield f"{json_line(line)}\n".encode()
