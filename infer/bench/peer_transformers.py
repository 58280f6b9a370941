"""Hugging Face transformers as a peer, in a process of its own (:mod:`infer.bench.peer_process`).

The modes are plain greedy ``generate``, assisted generation with our draft length in every round
(``assisted``), and with its own settings (``assisted-default``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from infer.bench.peer_process import Mode, PeerJob, main


def device_of(job: PeerJob) -> str:
    """The kind of device that our model is on, as torch calls it.

    Raises:
      RuntimeError: torch sees no such device.
    """
    import torch

    if job.on_cpu:
        return "cpu"
    if not torch.cuda.is_available():
        raise RuntimeError(
            "our model is on an accelerator, and torch sees no GPU: install torch for CUDA, or set "
            "JAX_PLATFORMS=cpu"
        )
    return "cuda"


def load(directory: str, job: PeerJob) -> Any:
    """A model on our device and in our dtype, ready to decode.

    Of its generation config only the special ids stay: penalties would change the peer's tokens
    alone.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    device = device_of(job)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=job.dtype).eval().to(device)
    ids = {
        name: getattr(model.generation_config, name) for name in ("bos_token_id", "eos_token_id")
    }
    model.generation_config = GenerationConfig(**ids)
    return model


def make_mode(model: Any, **options: Any) -> Mode:
    """A mode that calls ``generate`` with these options."""
    import torch

    def mode(prompt: list[int], budget: int, began: Callable[[], None]) -> list[int]:
        def after_round(ids: Any, scores: Any, **_: Any) -> Any:
            if ids.is_cuda:
                torch.cuda.synchronize()  # before that the token is not there
            began()
            return ids[:, 0] < 0  # no row stops here

        ids = torch.tensor([prompt], device=model.device)
        with torch.inference_mode():
            generated = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                use_cache=True,
                max_new_tokens=budget,
                pad_token_id=0,
                stopping_criteria=[after_round],
                **options,
            )
        return generated[0, len(prompt) :].tolist()

    return mode


def make_modes(job: PeerJob) -> dict[str, Mode]:
    """Plain and assisted generation of a job's models."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(job.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target = load(job.target, job)
    target.generation_config.eos_token_id = job.eos_ids or None
    modes = {"generate": make_mode(target)}
    if job.draft:
        draft = load(job.draft, job)
        draft.generation_config.num_assistant_tokens = job.gamma
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        modes["assisted"] = make_mode(target, assistant_model=draft)
        modes["assisted-default"] = make_mode(target, assistant_model=load(job.draft, job))
    return modes


if __name__ == "__main__":
    sys.exit(main(make_modes))
