"""Results: one JSON object per row, printed with ``--json`` or appended to ``--out``.

A row is on disk as soon as it has ended, before the device is polled again. A resumed job cuts off
an incomplete last line and decodes the rows that are missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from infer.digests import DIGEST, SHOWN_DIGITS
from specjax._util.appending import AppendedFile
from specjax._util.checks import quoted
from specjax._util.errors import OptionError
from specjax._util.files import (
    aside,
    check_file,
    complete_bytes,
    cut_incomplete_line,
    json_line,
    locked,
    parse_json,
)
from specjax._util.parts import file_to_append, part_files, remove_parts
from specjax._util.program import Place
from specjax.metrics import perplexity, rates, speeds
from specjax.rewards import Combined
from specjax.runtime.generate import Generation

RowKey = tuple[int, int]  # index of the prompt, sample
PROMPT_DIGEST = "prompt" + DIGEST
# Settings that a row has only if they were given.
OPTIONAL = (
    "reward",
    "suffix",
    "truncate",
    "quantize",
    "cache_dtype",
    "dataset",
)
# How a row begins: with its id between these.
BEFORE_ID = '{"id": '
AFTER_ID = ', "index": '


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
    counters["accepted_emitted"] = int(generation.accepted_emitted[row])
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
    if generation.hypotheses is not None:
        entry["hypotheses"] = [
            {"text": one.text, "token_ids": one.tokens.tolist(), "score": one.score}
            for one in generation.hypotheses[row]
        ]
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

    With a ``place`` it appends to this process's part (:mod:`specjax._util.parts`).

    Args:
      settings: what all rows of the file must have been written with.
      prompts: the digest of each prompt, by its index (:func:`prompt_digest`).

    Raises:
      OptionError: a file cannot be written, is not a result file, or was written with other
        settings or prompts. Nothing is changed then.
    """

    def __init__(
        self,
        path: str,
        settings: dict[str, Any],
        prompts: Mapping[int, str],
        place: Place | None = None,
    ):
        self._path = path
        self._settings = settings
        self._prompts = prompts
        self._place = place
        self._file = file_to_append(path, place)
        try:
            for file in (path, self._file):
                if os.path.lexists(file):
                    check_file(file)
            self.done: set[RowKey] = {key for key, _ in self._stored_rows()}
            self._file.open("ab").close()
            cut_incomplete_line(self._file)
            self._appended = AppendedFile(self._file, f"--out {path}", "rows", OptionError)
        except OSError as error:
            raise OptionError(f"--out {path}: cannot be written ({error.strerror})") from None

    def _stored_rows(self) -> Iterator[tuple[RowKey, bytes]]:
        """The key and line of every row, in the parts and then in ``--out``.

        The order matters: a process that joins the parts removes them when all rows are in
        ``--out``. In the other order, such rows could be missed in both.
        """
        for file in (*part_files(self._path), Path(self._path)):
            with contextlib.suppress(FileNotFoundError):
                yield from self._rows_in(file)

    def _rows_in(self, file: Path) -> Iterator[tuple[RowKey, bytes]]:
        """The key and line of every complete line of a file.

        A last line without its end may be a row that was cut off.
        """
        data = file.read_bytes()
        torn = data[complete_bytes(data) :]
        if torn and not _may_be_row(torn):
            raise OptionError(
                f"--out {file}: its last line is no result of this program; choose another file"
            )
        for number, line in enumerate(data[: complete_bytes(data)].splitlines(), 1):
            try:
                entry = parse_json(line)
                key = int(entry["index"]), int(entry["sample"])
            except (ValueError, KeyError, TypeError):
                raise OptionError(
                    f"--out {file}: line {number} is no result of this program; choose another file"
                ) from None
            self._check_settings(file, entry)
            self._check_prompt(file, entry)
            yield key, line

    def _check_settings(self, file: Path, entry: dict[str, Any]) -> None:
        """Raises OptionError if a row was written with other settings, or with other models."""
        for name, value in self._settings.items():
            if name not in entry:
                raise OptionError(
                    f"--out {file}: its rows do not say their {name}, so they may be of another "
                    "job; choose another file"
                )
            if entry[name] == value:
                continue
            if name.endswith(DIGEST):
                raise OptionError(
                    f"--out {file}: was written with another {name.removesuffix(DIGEST)} than "
                    f"the files have now; choose another file"
                )
            raise OptionError(
                f"--out {file}: was written with {name}={quoted(entry[name])}, this "
                f"job has {value!r}; choose another file"
            )
        for name in OPTIONAL:
            if name in entry and name not in self._settings:
                raise OptionError(
                    f"--out {file}: was written with {name}={quoted(entry[name])}, this job has "
                    "none; choose another file"
                )

    def _check_prompt(self, file: Path, entry: dict[str, Any]) -> None:
        """Raises OptionError if a row was written for a prompt that this job does not have."""
        index = entry["index"]
        if index not in self._prompts:
            raise OptionError(
                f"--out {file}: has a row of prompt {index}, and this job has no such prompt; "
                "choose another file"
            )
        if entry.get(PROMPT_DIGEST) != self._prompts[index]:
            raise OptionError(
                f"--out {file}: its row of prompt {index} was written for another prompt: "
                f"{quoted(entry.get('prompt'))}; choose another file"
            )

    def append(self, entry: dict[str, Any]) -> None:
        """Writes one row and returns once it is on disk.

        Raises:
          OptionError: somebody else has changed the file since the last row, or it cannot be
            written.
        """
        self._appended.append(json_line(entry))

    def join(self, wanted: Set[RowKey]) -> int:
        """Joins all parts into ``--out``, sorted by index and sample.

        Returns how many of the ``wanted`` rows are missing. Nothing is joined while any is: another
        process still decodes it, and joins the parts when it ends.

        Raises:
          OptionError: somebody else has changed the file since the last row.
        """
        lock: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self._place is not None:  # a job without a place has locked --out for its whole run
            lock = locked(self._path, "--out", math.inf)
        with lock:
            # Another process that found no row missing has removed all parts, this one's too.
            may_be_joined = self._place is not None and not self._file.exists()
            if not may_be_joined:
                self._appended.check_unchanged()
                if not part_files(self._path):
                    return 0
            rows = dict(self._stored_rows())
            num_missing = len(wanted - rows.keys())
            if num_missing:
                self._appended.check_unchanged()
                return num_missing
            if may_be_joined:
                return 0
            with aside(os.path.realpath(self._path)) as scratch, scratch.open("wb") as file:
                file.writelines(rows[key] + b"\n" for key in sorted(rows))
                file.flush()
                os.fsync(file.fileno())
            remove_parts(self._path)
        return 0


def prompt_digest(tokens: Sequence[int], constraints: Mapping[str, Any]) -> str:
    """A digest of what a prompt is: its token ids and its constraints."""
    content = json.dumps([list(map(int, tokens)), constraints], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:SHOWN_DIGITS]


def _may_be_row(torn: bytes) -> bool:
    """Whether the end of a file can be a row of this program without its end."""
    try:
        entry = parse_json(torn)
    except ValueError:
        return _may_be_cut_row(torn.decode(errors="ignore"))
    return isinstance(entry, dict) and {"index", "sample", "token_ids"} <= entry.keys()


def _may_be_cut_row(text: str) -> bool:
    """Whether ``text`` can be the beginning of a row."""
    if len(text) <= len(BEFORE_ID):
        return BEFORE_ID.startswith(text)
    if not text.startswith(BEFORE_ID):
        return False
    try:
        _, end = json.JSONDecoder().raw_decode(text, len(BEFORE_ID))
    except ValueError:  # the id itself is cut off
        return text[len(BEFORE_ID)] in '"-'
    following = text[end:]
    return following.startswith(AFTER_ID) or AFTER_ID.startswith(following)
