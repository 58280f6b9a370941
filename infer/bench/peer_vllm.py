"""vLLM as a peer, in a process of its own (:mod:`infer.bench.peer_process`).

It uses the offline API, one prompt at a time: https://docs.vllm.ai/en/stable/api/vllm/#vllm.LLM.
That does not tell when the first token came.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from infer.bench.peer_process import Mode, PeerJob, main


def make_modes(job: PeerJob) -> dict[str, Mode]:
    """Plain greedy decoding of a job's target, in our dtype."""
    os.environ.setdefault("OMP_NUM_THREADS", str(job.threads))
    from vllm import LLM, SamplingParams, TokensPrompt

    target = LLM(
        model=job.target,
        dtype=job.dtype,
        max_model_len=max(map(len, job.prompts)) + job.budget,
        max_num_seqs=1,
        skip_tokenizer_init=True,  # prompts are token ids, and so is what comes back
        enable_prefix_caching=False,  # a second repeat must prefill again
    )

    def mode(prompt: list[int], budget: int, began: Callable[[], None]) -> list[int]:
        greedy = SamplingParams(
            temperature=0.0,
            max_tokens=budget,
            stop_token_ids=job.eos_ids,
            detokenize=False,
        )
        tokens = TokensPrompt(prompt_token_ids=prompt)
        (output,) = target.generate([tokens], greedy, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    return {"generate": mode}


if __name__ == "__main__":
    sys.exit(main(make_modes))
