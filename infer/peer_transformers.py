"""Hugging Face transformers as a peer, in a process of its own.

Reads one JSON object (models, prompts, budget) from stdin, warms up, then answers each further
line with one timed repeat: plain greedy ``generate`` and assisted generation, one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def load(directory: str) -> Any:
    """The model in float32, ready to decode."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def decode(model: Any, prompts: list[list[int]], budget: int, **more: Any) -> dict[str, Any]:
    """Greedy tokens of each prompt, and the seconds of the whole."""
    import torch

    tokens, seconds = [], 0.0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        began = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=budget,
            pad_token_id=0,
            **more,
        )
        seconds += time.perf_counter() - began
        tokens.append(out[0, len(prompt) :].tolist())
    return {"tokens": tokens, "tokens_per_second": sum(map(len, tokens)) / seconds}


def main() -> int:
    """Serves repeats until stdin closes."""
    job = json.loads(sys.stdin.readline())
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(job["threads"])
    target = load(job["target"])
    modes: dict[str, dict[str, Any]] = {"generate": {}}
    if job["draft"]:
        draft = load(job["draft"])
        draft.generation_config.num_assistant_tokens = job["gamma"]
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        modes["assisted"] = {"assistant_model": draft}
    with torch.inference_mode():
        for more in modes.values():
            decode(target, job["prompts"][:1], min(8, job["budget"]), **more)
        print("ready", flush=True)
        for _ in sys.stdin:
            answer = {
                name: decode(target, job["prompts"], job["budget"], **more)
                for name, more in modes.items()
            }
            print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
