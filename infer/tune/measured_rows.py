"""Rows in a file of JSON lines: each is measured once, so a tuning started again continues."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infer.digests import model_digests, prompts_digest, reward_digests
from infer.tune.candidates import TuneSetting
from specjax._util.files import append_line, parse_json
from specjax._util.program import say

# Arguments that every row depends on, then those of one kind of rows.
SHARED = (
    "target",
    "draft",
    "dtype",
    "quantize",
    "cache_dtype",
    "base",
    "pass_width",
    "reward",
    "set",
    "chat",
    "stop",
    "max_new_tokens",
    "mesh",
    "draft_whole",
    "seed",
    "method",
    "dataset",
    "sample",
    "test_sample",
    "temperature",
    "top_k",
    "top_p",
)
BEGIN = '{"key": {"kind": '  # of a line
ON_VALIDATION = ("validation", "batch_size")
ON_TEST = ("test", "test_batch_size")


class MeasuredRows:
    """The rows of a file. :meth:`get` measures and appends those that are not there yet.

    A stored row counts with the same arguments, models, rewards and prompts.
    """

    def __init__(
        self,
        path: Path,
        args: argparse.Namespace,
        validation: TuneSetting,
        test: TuneSetting | None,
    ):
        self._path = path
        self._args = args
        self._digests = model_digests(args, validation.target, validation.draft)
        self._digests |= reward_digests(validation.reward)
        self._validation = prompts_digest(validation.prompts)
        self._test = prompts_digest(test.prompts) if test else None
        self._rows: dict[str, dict[str, Any]] = {}
        # Bytes: text would also split at U+2028 and the like, which JSON allows in strings.
        data = path.read_bytes() if path.exists() else b""
        # A run that was killed may leave a last line without its end.
        self._is_torn = bool(data) and not data.endswith(b"\n")
        for line in data.splitlines():
            try:
                entry = parse_json(line)
                if "each" in entry["row"]:  # older versions kept no spread: measure again
                    self._rows[json.dumps(entry["key"])] = entry["row"]
            except (ValueError, KeyError, TypeError):
                continue

    def get(
        self, kind: str, point: dict[str, Any], measure: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """A row: from the file if it is there, else measured and appended.

        Args:
          kind: ``test``, or what else the row is for; it tells rows of one point apart.
          point: the options, or the name and options, that are measured.
          measure: returns the row.
        """
        key = {"kind": kind, "point": point, "job": self._job(kind)}
        known = self._rows.get(json.dumps(key))
        if known is not None:
            return known

        row = measure()
        line = json.dumps({"key": key, "row": row})
        if self._is_torn:
            line = "\n" + line
            self._is_torn = False
        append_line(self._path, line)
        self._rows[json.dumps(key)] = row  # the curves ask for points of the grid again

        score = "soft_of_constraints" if "soft_of_constraints" in row else "perplexity"
        say(
            "infer.tune",
            f"{kind} {json.dumps(point)}: {score} {row[score]:.3f}, P {row['cost']:.2f}, "
            f"{row['tokens_per_second']:.0f} tokens/s",
        )
        return row

    def _job(self, kind: str) -> dict[str, Any]:
        """What a row of this kind depends on: arguments, and the content of files."""
        is_on_test = kind == "test"
        names = (*SHARED, *(ON_TEST if is_on_test else ON_VALIDATION))
        arguments = {name: getattr(self._args, name) for name in names}
        prompts = self._test if is_on_test else self._validation
        return arguments | self._digests | {"prompts_digest": prompts}
