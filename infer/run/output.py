"""Results: one JSON object per row, printed with ``--json`` or appended to ``--out``.

A row is on disk as soon as it has ended, before the device is polled again. A resumed job cuts off
an incomplete last line and decodes the rows that are missing.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from infer.run.parts import file_to_append, part_files, remove_parts
from specjax._util.checks import quoted
from specjax._util.errors import OptionError
from specjax._util.files import append_line, aside, check_file, json_line, locked, parse_json
from specjax._util.program import Place
from specjax.metrics import perplexity, rates, speeds
from specjax.rewards import Combined
from specjax.runtime.generate import Generation

RowKey = tuple[int, int]  # index of the prompt, sample


def row_object(
    generation: Generation, row: int, head: dict[str, Any], reward: Combined | None
) -> dict[str, Any]:
    """The JSON object of one row.

    Its ``stats`` are counters, rates, and seconds since the row's decoding began.

    Args:
      row: the row's number in ``generation``.
      head: the first fields of the object, such as id, index, sample and method.
      reward: the reward that scored the row; None: the object has no rewards.
    """
    tokens = generation.tokens[row]
    counters = {name: values[row].tolist() for name, values in generation.stats.items()}
    seconds = speeds(
        counters,
        float(generation.prefill_seconds[row]),
        float(generation.first_token_seconds[row]),
        float(generation.decode_seconds[row]),
    )
    entry = head | {
        "text": generation.text[row],
        "token_ids": tokens.tolist(),
        "prompt_tokens": generation.prompt_tokens[row],
        "cached_tokens": generation.cached_tokens[row],
        "new_tokens": len(tokens),
        "finish_reason": generation.finish_reasons[row],
        "stats": counters | rates(counters) | seconds,
    }
    if generation.logprobs is not None:
        entry["logprobs"] = [round(float(x), 6) for x in generation.logprobs[row]]
        entry["perplexity"] = perplexity(generation.logprobs[row])
    if reward is not None:
        scores = generation.rewards[row].tolist()
        # JSON has no infinity: the score of a reward that failed becomes null.
        entry["rewards"] = [
            {"name": part.name, "score": score if math.isfinite(score) else None}
            for part, score in zip(reward.parts, scores, strict=True)
        ]
        entry["satisfied"] = reward.satisfied(scores)
    return entry


class Output:
    """The result file: reads which rows are ``done``, and appends others.

    With a ``place`` it appends to this process's part (:mod:`infer.run.parts`).

    Raises:
      OptionError: a file cannot be written, is not a result file, or was written with other
        ``settings``.
    """

    def __init__(self, path: str, settings: dict[str, Any], place: Place | None = None):
        self._path = path
        self._settings = settings
        self._place = place
        self._file = file_to_append(path, place)
        try:
            for file in (path, self._file):
                if os.path.lexists(file):
                    check_file(file)
            self._file.open("ab").close()
        except OSError as error:
            raise OptionError(f"--out {path}: cannot be written ({error.strerror})") from None

        self.done: set[RowKey] = {key for key, _ in self._stored_rows()}
        self._cut_incomplete_line()

    def _stored_rows(self) -> Iterator[tuple[RowKey, bytes]]:
        """The key and line of every row, in the parts and then in ``--out``.

        The order matters: a process that joins the parts removes them when all rows are in
        ``--out``. In the other order, such rows could be missed in both.
        """
        for file in (*part_files(self._path), Path(self._path)):
            with contextlib.suppress(FileNotFoundError):
                yield from self._rows_in(file)

    def _rows_in(self, file: Path) -> Iterator[tuple[RowKey, bytes]]:
        """The key and line of every complete line of a file."""
        data = file.read_bytes()
        for number, line in enumerate(data[: _complete_bytes(data)].splitlines(), 1):
            try:
                entry = parse_json(line)
                key = int(entry["index"]), int(entry["sample"])
            except (ValueError, KeyError, TypeError):
                raise OptionError(
                    f"--out {file}: line {number} is no result of this program; choose another file"
                ) from None
            for name, value in self._settings.items():
                if entry.get(name) != value:
                    stored = quoted(entry.get(name))
                    raise OptionError(
                        f"--out {file}: was written with {name}={stored}, this "
                        f"job has {value!r}; choose another file"
                    )
            yield key, line

    def _cut_incomplete_line(self) -> None:
        """Cuts off a last line without its end, which a killed process may have left."""
        with contextlib.suppress(FileNotFoundError), self._file.open("r+b") as file:
            data = file.read()
            complete = _complete_bytes(data)
            if complete < len(data):
                file.truncate(complete)
                os.fsync(file.fileno())

    def append(self, entry: dict[str, Any]) -> None:
        """Writes one row and returns once it is on disk."""
        append_line(self._file, json_line(entry))

    def join(self, wanted: Set[RowKey]) -> int:
        """Joins all parts into ``--out``, sorted by index and sample.

        Returns how many of the ``wanted`` rows are missing. Nothing is joined while any is: another
        process still decodes it, and joins the parts when it ends.
        """
        lock: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self._place is not None:  # a job without a place has locked --out for its whole run
            lock = locked(self._path, "--out", math.inf)
        with lock:
            if not part_files(self._path):
                return 0
            rows = dict(self._stored_rows())
            num_missing = len(wanted - rows.keys())
            if num_missing:
                return num_missing
            with aside(os.path.realpath(self._path)) as scratch, scratch.open("wb") as file:
                file.writelines(rows[key] + b"\n" for key in sorted(rows))
                file.flush()
                os.fsync(file.fileno())
            remove_parts(self._path)
        return 0


def _complete_bytes(data: bytes) -> int:
    """The number of bytes up to the end of the last complete line."""
    return data.rfind(b"\n") + 1
