"""What a run gives: one object per row, printed with ``--json`` or appended to ``--out``.

A row is on disk when it has ended, before the device is looked at again; a started-again job
truncates a torn last line and does what is missing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.checks import quoted
from specjax.errors import OptionError
from specjax.files import append_line, check_file, json_line, parse_json
from specjax.generate import Generation
from specjax.metrics import perplexity, rates, speeds
from specjax.rewards import Combined


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

    Raises:
      OptionError: the file cannot be written, was written by a job with other ``settings``, or is
        no result file.
    """

    def __init__(self, path: str, settings: dict[str, Any]):
        self._path = Path(path)
        self._settings = settings
        try:
            if os.path.lexists(path):
                check_file(path)
            self._path.open("ab").close()
        except OSError as error:
            raise OptionError(f"--out {path}: cannot be written ({error.strerror})") from None
        self.done = set(self._finished())

    def _finished(self) -> Iterator[tuple[int, int]]:
        """(index, sample) of each whole line; a torn last line is cut off the file."""
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = parse_json(line)
                place = int(entry["index"]), int(entry["sample"])
            except (ValueError, KeyError, TypeError):
                raise OptionError(
                    f"--out {self._path}: line {number} is no result of this program; choose "
                    "another file"
                ) from None
            yield place
            for name, value in self._settings.items():
                if entry.get(name) != value:
                    was = quoted(entry.get(name))
                    raise OptionError(
                        f"--out {self._path}: was written with {name}={was}, this "
                        f"job has {value!r}; choose another file"
                    )
        if len(whole) < len(data):
            with self._path.open("r+b") as file:
                file.truncate(len(whole))
                os.fsync(file.fileno())

    def append(self, entry: dict[str, Any]) -> None:
        """Writes one row and returns once it is on disk."""
        append_line(self._path, json_line(entry))
