"""Peers run in processes of their own and in turn with us, never beside us."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from infer.bench.timed_cases import Result
from infer.rescoring import Prompts, mismatches
from infer.uncertainty import speed_ratio
from specjax._util.errors import OptionError
from specjax.lm import LM

MODES = (
    ("generate", "autoregressive"),
    ("assisted", "speculative"),
    ("assisted-default", "speculative"),
)


class TransformersPeer:
    """The process of :mod:`infer.bench.peer_transformers`; :meth:`repeat` is its turn.

    A context manager: the process is warm on entry and gone on exit.
    """

    def __init__(self, target: str, draft: str | None, prompts: Prompts, budget: int, gamma: int):
        self._job = {
            "target": target,
            "draft": draft,
            "budget": budget,
            "gamma": gamma,
            "prompts": [list(map(int, prompt)) for prompt in prompts],
            "threads": os.cpu_count(),
        }
        self.answers: list[dict[str, Any]] = []

    def __enter__(self) -> TransformersPeer:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "infer.bench.peer_transformers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            process_group=0,  # the terminal's interrupts are ours: we end it
        )
        try:
            self._ask(self._job)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # It keeps nothing that would be lost, and may be in the middle of a repeat.
        self._process.kill()
        self._process.communicate()

    def repeat(self, number: int) -> None:
        """One timed repeat of every mode."""
        self.answers.append(self._ask({"repeat": number}))

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # the answer, or its absence, says why
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise OptionError(f"the transformers peer ended with {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise OptionError(f"the transformers peer failed: {answer['error']}")
        return answer


def peer_rows(
    target: LM, prompts: Prompts, answers: Sequence[dict], results: Sequence[Result]
) -> list[dict[str, Any]]:
    """The peer's modes against ours, greedy, batch 1: plain with plain, assisted with speculative.

    Both sides count prefill: ``generate`` does not tell it apart.
    """
    rows = []
    for name, ours in MODES:
        alike = [r for r in results if (r.case.mode, r.case.batch_size) == ("greedy", 1)]
        mine = next((r for r in alike if r.case.method == ours), None)
        theirs = [answer[name] for answer in answers if name in answer]
        if mine is None or not theirs:
            continue
        counts = np.array([[len(tokens) for tokens in t["tokens"]] for t in theirs])
        seconds = np.array([t["seconds"] for t in theirs])
        ratio, half_width = speed_ratio(mine.speed(whole=True), (counts, seconds))
        speeds = counts.sum(axis=1) / seconds.sum(axis=1)
        first = [t["first_token_s"] for t in theirs]
        tokens = [np.array(t) for t in theirs[0]["tokens"]]
        rows.append(
            {
                "name": f"transformers {name}",
                "ours": ours,
                "tokens_per_second": float(np.median(speeds)),
                "our_tokens_per_second": float(np.median(mine.tokens_per_second(whole=True))),
                "ratio": ratio,
                "pm": {"ratio": half_width},
                "first_token_ms": 1e3 * float(np.median(first)),
                "per_prompt": np.median([t["tokens_per_second"] for t in theirs], axis=0).tolist(),
                "repeats": speeds.tolist(),
                "mismatches": mismatches(target, prompts, mine.tokens, tokens),
            }
        )
    return rows
