"""Hugging Face transformers as a peer, in a process of its own.

Reads one JSON object (models, prompts, budget) from stdin, warms up, then answers each further
line with one timed repeat, one JSON line: plain greedy ``generate``, assisted generation with our
draft length every round (``assisted``) and with its own settings (``assisted-default``).
What cannot be run is answered with ``{"error": why}``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any


def load(directory: str) -> Any:
    """The model in float32, ready to decode."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()


class Clock:
    """Dates the first token: ``generate`` asks its stopping criteria after every round."""

    def __init__(self):
        self.began, self.first = time.perf_counter(), None

    def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
        self.first = self.first or time.perf_counter() - self.began
        return ids[:, 0] < 0  # no row ends here


def decode(model: Any, prompts: list[list[int]], budget: int, **more: Any) -> dict[str, Any]:
    """Greedy tokens, seconds, speed and seconds to the first token, one entry per prompt."""
    import torch

    out: dict[str, Any] = {"tokens": [], "seconds": [], "first_token_s": []}
    for prompt in prompts:
        ids, clock = torch.tensor([prompt]), Clock()
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            use_cache=True,
            max_new_tokens=budget,
            pad_token_id=0,
            stopping_criteria=[clock],
            **more,
        )
        out["seconds"].append(time.perf_counter() - clock.began)
        out["first_token_s"].append(clock.first)
        out["tokens"].append(generated[0, len(prompt) :].tolist())
    pairs = zip(out["tokens"], out["seconds"], strict=True)
    return out | {"tokens_per_second": [len(tokens) / seconds for tokens, seconds in pairs]}


def make_modes(job: dict[str, Any]) -> tuple[Any, dict[str, dict[str, Any]]]:
    """The target, and the arguments of ``generate`` for each mode."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    modes: dict[str, dict[str, Any]] = {"generate": {}}
    if job["draft"]:
        draft = load(job["draft"])
        draft.generation_config.num_assistant_tokens = job["gamma"]
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        modes["assisted"] = {"assistant_model": draft}
        modes["assisted-default"] = {"assistant_model": load(job["draft"])}
    return load(job["target"]), modes


def serve(lines: Any) -> Any:
    """Answers to the lines: ``ready`` to the first, a repeat to every other one."""
    import torch

    job = json.loads(next(lines))
    torch.set_num_threads(job["threads"])
    target, modes = make_modes(job)
    with torch.inference_mode():
        for more in modes.values():
            decode(target, job["prompts"][:1], min(8, job["budget"]), **more)
        yield {"ready": True}
        for _ in lines:
            yield {
                name: decode(target, job["prompts"], job["budget"], **more)
                for name, more in modes.items()
            }


def main() -> int:
    """Serves until stdin closes; stdout carries the answers and nothing else."""
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        try:
            for answer in serve(iter(sys.stdin)):
                print(json.dumps(answer), file=answers, flush=True)
        except Exception as error:  # whatever a foreign program raises, told in one line
            why = " ".join(f"{type(error).__name__}: {error}".split())
            print(json.dumps({"error": why}), file=answers, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
