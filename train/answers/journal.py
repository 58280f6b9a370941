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

from specjax._util.errors import InputError
from specjax._util.files import (
    append_line,
    aside,
    cut_incomplete_line,
    json_line,
    locked,
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


class AnswerJournal:
    """The answers that are on disk.

    Attributes:
      answers: of conversations that are not complete: by question, in order.
      complete: the numbers of complete conversations.

    Raises:
      InputError: a part was written with other settings, or is none.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any], place: Place):
        self._out = out
        self._settings = settings
        self._file = file_to_append(str(out), place)
        self.complete: set[int] = set()
        cut_incomplete_line(self._file)
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
        """
        with locked(self._out, "OUT", math.inf):
            done: dict[int, dict[str, Any]] = {}
            for entry in self._entries():
                if LINES in entry:
                    done[entry[INDEX]] = entry
            if len(done) < count:
                return None
            sums: collections.Counter[str] = collections.Counter()
            with aside(self._out) as scratch, scratch.open("w", encoding="utf-8") as file:
                for index in sorted(done):
                    for line in done[index][LINES]:
                        file.write(json_line(line) + "\n")
                    sums.update(done[index][COUNTS])
                file.flush()
                os.fsync(file.fileno())
            remove_parts(str(self._out))
        return dict(sums)

    def _append(self, entry: dict[str, Any]) -> None:
        lines = [entry]
        # The settings come with the first answer, so that a refused job leaves no file behind.
        if not self._file.exists() or not self._file.stat().st_size:
            lines.insert(0, {SETTINGS: dict(self._settings)})
        try:
            append_line(self._file, "\n".join(map(json.dumps, lines)))
        except OSError as error:
            raise InputError(
                f"{self._out}: cannot be written ({error.strerror}); its answers stay, and the "
                "same command goes on"
            ) from None

    def _entries(self) -> Iterator[dict[str, Any]]:
        """The entries of all parts, but their settings, which are checked."""
        for path in part_files(str(self._out)):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                for number, line in enumerate(file):
                    if not line.endswith(b"\n"):
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
