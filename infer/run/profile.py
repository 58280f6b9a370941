"""``infer.run --profile``: a trace of warm rounds, for a profiler's viewer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

import specjax as sj

TRACE = "perfetto_trace.json.gz"


def trace_second_run(decode: Callable[[], sj.Generation], directory: Path) -> None:
    """Calls ``decode`` twice, traces the second call, and prints where the trace is.

    In the second call nothing compiles. The trace has what the host and the device did. Operations
    carry the name of their part of a round (``draft``, ``target_pass``, ``rule``). A CUDA graph is
    one entry, so on a GPU set ``SPECJAX_GPU_GRAPHS=0`` to see kernels.
    """
    decode()
    with jax.profiler.trace(str(directory), create_perfetto_trace=True):
        out = decode()
    trace = max(directory.rglob(TRACE), key=lambda path: path.stat().st_mtime)
    print(f"{out.lengths.sum()} tokens in {len(out.lengths)} rows: {trace}")
    print(f"open it at https://ui.perfetto.dev, or {directory} in TensorBoard")
