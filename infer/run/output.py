"""What a run gives: one object per row, printed with ``--json`` or appended to ``--out``.

A row is on disk when it has ended, before the device is looked at again; a started-again job
truncates a torn last line and does what is missing.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from infer.run.parts import own_file, parts_of, remove_parts
from specjax._util.checks import quoted
from specjax._util.errors import OptionError
from specjax._util.files import append_line, aside, check_file, json_line, locked, parse_json
from specjax._util.program import Place
from specjax.metrics import perplexity, rates, speeds
from specjax.rewards import Combined
from specjax.runtime.generate import Generation


def row_object(
    generation: Generation, row: int, head: dict[str, Any], reward: Combined | None
) -> dict[str, Any]:
    """The object of one row; ``head`` are its first fields (id, sample, method, prompt …).

    Its ``stats`` are counters, rates and times since its turn came.
    """
    tokens = generation.tokens[row]
    counters = {name: values[row].tolist() for name, values in generation.stats.items()}
    spans = (generation.prefill_seconds, generation.first_token_seconds, generation.decode_seconds)
    times = speeds(counters, *(float(seconds[row]) for seconds in spans))
    entry = head | {
        "text": generation.text[row],
        "token_ids": tokens.tolist(),
        "prompt_tokens": generation.prompt_tokens[row],
        "cached_tokens": generation.cached_tokens[row],
        "new_tokens": len(tokens),
        "finish_reason": generation.finish_reasons[row],
        "stats": counters | rates(counters) | times,
    }
    if generation.logprobs is not None:
        entry["logprobs"] = [round(float(x), 6) for x in generation.logprobs[row]]
        entry["perplexity"] = perplexity(generation.logprobs[row])
    if reward is not None:
        scores = generation.rewards[row].tolist()
        # JSON has no infinity: null is a reward that failed.
        entry["rewards"] = [
            {"name": part.name, "score": score if math.isfinite(score) else None}
            for part, score in zip(reward.parts, scores, strict=True)
        ]
        entry["satisfied"] = reward.satisfied(scores)
    return entry


class Output:
    """The result file: knows which (index, sample) are ``done`` and appends what is not.

    With a ``place`` it appends to this process's part (:mod:`infer.run.parts`).

    Raises:
      OptionError: a file cannot be written, was written by a job with other ``settings``, or is
        no result file.
    """

    def __init__(self, path: str, settings: dict[str, Any], place: Place | None = None):
        self._path, self._own = path, own_file(path, place)
        self._settings, self._place = settings, place
        try:
            for file in (path, self._own):
                if os.path.lexists(file):
                    check_file(file)
            self._own.open("ab").close()
        except OSError as error:
            raise OptionError(f"--out {path}: cannot be written ({error.strerror})") from None
        self.done = {row for row, _ in self._rows()}
        self._mend()

    def _rows(self) -> Iterator[tuple[tuple[int, int], bytes]]:
        """(index, sample) and line of what is in the parts and then in the whole.

        In this order: whoever joins them removes the parts when all is in the whole.
        """
        for file in (*parts_of(self._path), Path(self._path)):
            with contextlib.suppress(FileNotFoundError):
                yield from self._finished(file)

    def _finished(self, file: Path) -> Iterator[tuple[tuple[int, int], bytes]]:
        """(index, sample) and line of each whole line of a file."""
        data = file.read_bytes()
        for number, line in enumerate(data[: _whole(data)].splitlines(), 1):
            try:
                entry = parse_json(line)
                row = int(entry["index"]), int(entry["sample"])
            except (ValueError, KeyError, TypeError):
                raise OptionError(
                    f"--out {file}: line {number} is no result of this program; choose another file"
                ) from None
            for name, value in self._settings.items():
                if entry.get(name) != value:
                    was = quoted(entry.get(name))
                    raise OptionError(
                        f"--out {file}: was written with {name}={was}, this "
                        f"job has {value!r}; choose another file"
                    )
            yield row, line

    def _mend(self) -> None:
        """Cuts a torn last line off the file that this process appends to."""
        with contextlib.suppress(FileNotFoundError), self._own.open("r+b") as file:
            data = file.read()
            if _whole(data) < len(data):
                file.truncate(_whole(data))
                os.fsync(file.fileno())

    def append(self, entry: dict[str, Any]) -> None:
        """Writes one row and returns once it is on disk."""
        append_line(self._own, json_line(entry))

    def join(self, wanted: Set[tuple[int, int]]) -> int:
        """Puts all parts into the whole, by index and sample, and returns 0.

        Where ``wanted`` rows are missing it returns how many, and leaves it to who ends last.
        """
        alone = self._place is None
        with contextlib.nullcontext() if alone else locked(self._path, "--out", math.inf):
            if not parts_of(self._path):
                return 0
            rows = dict(self._rows())
            if missing := len(wanted - rows.keys()):
                return missing
            with aside(os.path.realpath(self._path)) as scratch, scratch.open("wb") as file:
                file.writelines(rows[row] + b"\n" for row in sorted(rows))
                file.flush()
                os.fsync(file.fileno())
            remove_parts(self._path)
        return 0


def _whole(data: bytes) -> int:
    """The bytes up to the end of the last whole line."""
    return data.rfind(b"\n") + 1
