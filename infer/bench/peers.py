"""Other libraries as peers: each runs in its own process, and takes turns with us.

A peer never runs at the same time as we do, so neither side slows down the other.

Axis legend: R repeats, P prompts.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infer.bench.peer_process import PeerJob
from infer.bench.peer_table import PEERS
from infer.bench.timed_cases import Result
from infer.gguf_weights import KINDS, write_weights
from infer.rescoring import Prompts, mismatches
from infer.uncertainty import speed_ratio
from specjax._util.errors import OptionError
from specjax._util.program import module_command
from specjax.lm import LM
from specjax.models.gguf.header import is_gguf


class Peer:
    """The process of a peer, warm on entry and gone on exit.

    :meth:`repeat` times it once, and adds its answer to ``answers``.
    """

    def __init__(self, name: str, job: PeerJob):
        self.name = name
        self.spec = PEERS[name]
        self._job = job._asdict()
        self.answers: list[dict[str, Any]] = []

    def __enter__(self) -> Peer:
        self._process = subprocess.Popen(
            module_command(self.spec.program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            process_group=0,  # Ctrl-C reaches only us, and we end the process
        )
        try:
            self._ask(self._job)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Killed at once: it has nothing to save, and may be in the middle of a repeat.
        self._process.kill()
        self._process.communicate()

    def repeat(self, number: int) -> None:
        """One timed repeat of every mode."""
        self.answers.append(self._ask({"repeat": number}))

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to one message.

        Raises:
          OptionError: the peer failed, or its process ended.
        """
        # If the process is gone, reading its answer below tells why.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise OptionError(f"the {self.name} peer ended with {self._process.wait()}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise OptionError(f"the {self.name} peer wrote {line.strip()!r}: no answer") from None
        if "error" in answer:
            raise OptionError(f"the {self.name} peer failed: {answer['error']}")
        return answer


def peer_weights(name: str, source: str, quantize: str | None, scratch: Path) -> str:
    """The path that a peer loads the target's weights from.

    Args:
      source: the target's Hugging Face directory or GGUF file.
      quantize: the scheme that the target was quantized with as it was loaded.
      scratch: a folder for weights in another form.
    Raises:
      OptionError: the peer cannot read these weights.
      ModelError: they cannot be written in the form that it reads.
    """
    spec = PEERS[name]
    if not spec.reads_gguf:
        if is_gguf(source):
            raise OptionError(
                f"--peer {name} reads no GGUF file: python -m infer.convert {source} --out DIR, "
                "and --target DIR"
            )
        if quantize:
            raise OptionError(
                f"--peer {name} has no weights of --quantize {quantize}: leave --quantize out"
            )
        return source
    if quantize not in KINDS:
        raise OptionError(
            f"--peer {name} has no weights of --quantize {quantize}: choose int8 (Q8_0 there), or "
            "leave --quantize out"
        )
    if is_gguf(source):
        if quantize:
            raise OptionError(f"--peer {name} reads {source} as it is: leave --quantize out")
        return source
    out = scratch / "target.gguf"
    write_weights(Path(source), out, quantize)
    return str(out)


def peer_rows(
    target: LM, prompts: Prompts, peer: Peer, results: Sequence[Result]
) -> list[dict[str, Any]]:
    """One row per mode of a peer, compared with our method, greedy at batch 1.

    Plain decoding is compared with plain, assisted with speculative. Both sides include prefill:
    ``generate`` does not tell it apart.
    """
    rows = []
    for mode, method in peer.spec.modes:
        ours = _greedy_result(method, results)
        theirs = [answer[mode] for answer in peer.answers if mode in answer]
        if ours is not None and theirs:
            rows.append(_peer_row(target, prompts, f"{peer.name} {mode}", theirs, ours))
    return rows


def _greedy_result(method: str, results: Sequence[Result]) -> Result | None:
    """Our first greedy result of a method at batch 1."""
    for result in results:
        case = result.case
        if case.method == method and case.mode == "greedy" and case.batch_size == 1:
            return result
    return None


def _peer_row(
    target: LM, prompts: Prompts, name: str, theirs: Sequence[dict], ours: Result
) -> dict[str, Any]:
    """A row of the peers' table, from the answers of all repeats in one mode."""
    tokens = np.array([[len(ids) for ids in answer["tokens"]] for answer in theirs])  # [R, P]
    seconds = np.array([answer["seconds"] for answer in theirs])  # [R, P]
    speeds = tokens.sum(axis=1) / seconds.sum(axis=1)
    per_prompt = [answer["tokens_per_second"] for answer in theirs]
    ratio, half_width = speed_ratio(ours.speed(whole=True), (tokens, seconds))
    # Peers know no stop strings: up to ours they must agree.
    reasons = ours.runs[0].finish_reasons
    outputs = [
        np.array(ids[: len(own)] if reason == "stop" else ids)
        for ids, own, reason in zip(theirs[0]["tokens"], ours.tokens, reasons, strict=True)
    ]
    return {
        "name": name,
        "ours": ours.case.method,
        "tokens_per_second": float(np.median(speeds)),
        "our_tokens_per_second": float(np.median(ours.tokens_per_second(whole=True))),
        "ratio": ratio,
        "pm": {"ratio": half_width},
        "first_token_ms": _first_token_ms(theirs),
        "per_prompt": np.median(per_prompt, axis=0).tolist(),
        "repeats": speeds.tolist(),
        "mismatches": mismatches(target, prompts, ours.tokens, outputs),
    }


def _first_token_ms(theirs: Sequence[dict]) -> float | None:
    """The median time to the first token; None if the peer does not tell it."""
    seconds = [second for answer in theirs for second in answer["first_token_s"]]
    if None in seconds:
        return None
    return 1e3 * float(np.median(seconds))
