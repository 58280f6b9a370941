"""llama.cpp as a peer, by llama-cpp-python, in a process of its own.

:mod:`infer.bench.peer_process` says how the process is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from infer.bench.peer_process import Mode, PeerJob, main


def load(job: PeerJob) -> Any:
    """The model of a GGUF file, with a KV cache in float32 as ours has."""
    import llama_cpp

    return llama_cpp.Llama(
        job.target,
        n_ctx=max(map(len, job.prompts)) + job.budget,
        n_threads=job.threads,
        n_threads_batch=job.threads,
        n_gpu_layers=0 if job.on_cpu else -1,  # all of them
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )


def make_modes(job: PeerJob) -> dict[str, Mode]:
    """Plain greedy decoding of a job's target."""
    target = load(job)
    eos_ids = set(job.eos_ids)

    def mode(prompt: list[int], budget: int, began: Callable[[], None]) -> list[int]:
        target.reset()  # else the cache of the last prompt is used where they begin alike
        output = []
        for token in target.generate(prompt, temp=0.0, repeat_penalty=1.0):
            began()
            output.append(int(token))
            if len(output) == budget or token in eos_ids:
                break
        return output

    return {"generate": mode}


if __name__ == "__main__":
    sys.exit(main(make_modes))
