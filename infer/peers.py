"""Peers run in processes of their own and in turn with us, never beside us."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from specjax.errors import OptionError

PEERS = ("transformers",)


class TransformersPeer:
    """The process of :mod:`infer.peer_transformers`; :meth:`repeat` is its turn."""

    def __init__(self, target: str, draft: str | None, prompts: Sequence[Sequence[int]],
                 budget: int, gamma: int):  # fmt: skip
        if importlib.util.find_spec("torch") is None:
            raise OptionError('--peer transformers needs torch: pip install "specjax[torch]"')
        self._process = subprocess.Popen(
            [sys.executable, "-m", "infer.peer_transformers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        job = {"target": target, "draft": draft, "prompts": [list(map(int, p)) for p in prompts],
               "budget": budget, "gamma": gamma, "threads": os.cpu_count()}  # fmt: skip
        self._say(json.dumps(job))
        self._read()
        self.answers: list[dict[str, Any]] = []

    def repeat(self, _: int) -> None:
        """One timed repeat of every mode."""
        self._say("go")
        self.answers.append(json.loads(self._read()))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _say(self, line: str) -> None:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            raise OptionError(f"the transformers peer ended with {self._process.wait()}; its "
                              "message is above")  # fmt: skip
        return line
