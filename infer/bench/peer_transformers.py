"""Hugging Face transformers as a peer, in a process of its own.

Reads one JSON object (models, prompts, budget) from stdin and warms up. Then it answers each
further line with one timed repeat, as one JSON line. The modes are plain greedy ``generate``,
assisted generation with our draft length in every round (``assisted``), and with its own settings
(``assisted-default``). If it fails, it answers ``{"error": why}``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

WARMUP_TOKENS = 8


def load(directory: str) -> Any:
    """The model in float32, ready to decode.

    Of its generation config only the special ids stay: penalties would change the peer's tokens
    alone.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    ids = {
        name: getattr(model.generation_config, name) for name in ("bos_token_id", "eos_token_id")
    }
    model.generation_config = GenerationConfig(**ids)
    return model


class Clock:
    """Times the first token: ``generate`` calls its stopping criteria after every round."""

    def __init__(self):
        self.began = time.perf_counter()
        self.first: float | None = None  # seconds to the first token

    def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
        if self.first is None:
            self.first = time.perf_counter() - self.began
        return ids[:, 0] < 0  # no row stops here


def decode(model: Any, prompts: list[list[int]], budget: int, **options: Any) -> dict[str, Any]:
    """Greedy tokens, seconds, speed and seconds to the first token, one entry per prompt."""
    import torch

    tokens = []
    seconds = []
    first_token_s = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        clock = Clock()
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            use_cache=True,
            max_new_tokens=budget,
            pad_token_id=0,
            stopping_criteria=[clock],
            **options,
        )
        seconds.append(time.perf_counter() - clock.began)
        first_token_s.append(clock.first)
        tokens.append(generated[0, len(prompt) :].tolist())
    speeds = [len(ids) / taken for ids, taken in zip(tokens, seconds, strict=True)]
    return {
        "tokens": tokens,
        "seconds": seconds,
        "first_token_s": first_token_s,
        "tokens_per_second": speeds,
    }


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


def serve(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The answer to each line: ``ready`` to the first, a repeat to every other one."""
    import torch

    job = json.loads(next(lines))
    torch.set_num_threads(job["threads"])
    target, modes = make_modes(job)
    with torch.inference_mode():
        for options in modes.values():
            decode(target, job["prompts"][:1], min(WARMUP_TOKENS, job["budget"]), **options)
        yield {"ready": True}
        for _ in lines:
            yield {
                mode: decode(target, job["prompts"], job["budget"], **options)
                for mode, options in modes.items()
            }


def main() -> int:
    """Serves until stdin closes. Only answers go to stdout; all else goes to stderr."""
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        try:
            for answer in serve(iter(sys.stdin)):
                print(json.dumps(answer), file=answers, flush=True)
        except Exception as error:  # transformers may raise anything: report it in one line
            why = " ".join(f"{type(error).__name__}: {error}".split())
            print(json.dumps({"error": why}), file=answers, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
