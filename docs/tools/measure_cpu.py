"""What decoding passes cost on a CPU: python docs/tools/measure_cpu.py [MODEL] [--forms FORM ...]

A pass reads all weights once, whatever the number of its tokens. The table has milliseconds of a
pass over one token, and what 2, 4, 8 and 16 tokens cost relative to it. Passes run in a loop, as in
decoding, with 256 positions in the cache. Widths are measured by turns. Each turn gives a ratio;
± is twice the standard error of their mean. Each form is a process of its own. With
`SPECJAX_CPU_KERNELS=0` it measures XLA's products. The peak (VmHWM) is that of a process that loads
the model and decodes 32 tokens after a prompt of 256. It needs Linux.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from infer.loading import use_compilation_cache

FORMS = ("float32", "bfloat16", "int8", "int4", "kept", "q8_0")
WIDTHS = (1, 2, 4, 8, 16)
CAPACITY = 256  # cache positions
PASSES = 8  # in a loop on the device
GROUP = 32  # inputs that share a scale in a Q8_0 block


def main() -> None:
    """Prints a table, or measures one form in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--seconds", type=float, default=12, help="of timing, for each form")
    parser.add_argument("--measure", choices=("time", "memory"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        use_compilation_cache()
        measure = pass_times if args.measure == "time" else peak
        print(json.dumps(measure(args.model, args.forms[0], args.seconds)))
        return
    relative = " | ".join(f"v({width})" for width in WIDTHS[1:])
    print(f"| weights | ms | {relative} | peak, MiB |")
    print("| --- |" + " ---: |" * (len(WIDTHS) + 1))
    for form in args.forms:
        first, *wider = child(args.model, form, args.seconds, "time")
        ratios = " | ".join(mean_ratio(times, first) for times in wider)
        memory = child(args.model, form, args.seconds, "memory")
        milliseconds = statistics.median(first) * 1e3
        print(f"| {form} | {milliseconds:.1f} | {ratios} | {memory:.0f} |", flush=True)


def mean_ratio(times: list[float], to: list[float]) -> str:
    """The mean of the turns' ratios, and twice its standard error."""
    ratios = [seconds / one for seconds, one in zip(times, to, strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    return f"{statistics.mean(ratios):.2f} ± {2 * error:.2f}"


def child(model: str, form: str, seconds: float, measure: str):
    """One measurement in a process of its own."""
    command = [sys.executable, __file__, model, "--forms", form]
    command += ["--seconds", str(seconds), "--measure", measure]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def load(model: str, form: str):
    """The model with its weights in this form."""
    import specjax as sj

    if form == "kept":
        return sj.load(model, dtype="float32")
    if form in ("int8", "int4"):
        return sj.load(model, dtype="float32", quantize=form)
    dtype = "bfloat16" if form == "bfloat16" else "float32"
    loaded = sj.load(model, dtype=dtype, quantize="none")
    return in_blocks(loaded) if form == "q8_0" else loaded


def in_blocks(model):
    """The model with its matrices as GGUF's Q8_0 keeps them: float16 scales of 32 inputs."""
    import dataclasses

    import jax
    import jax.numpy as jnp

    from specjax.models.quantized import Grouped

    def quantized(weight):
        if weight.ndim != 2:
            return weight
        parts = weight.reshape(weight.shape[0], -1, GROUP)
        scales = (jnp.abs(parts).max(-1) / 127).astype(jnp.float16)
        codes = jnp.round(parts / scales[..., None].astype(jnp.float32))
        codes = jnp.clip(codes, -127, 127).reshape(weight.shape).astype(jnp.int8)
        return Grouped(codes.T, scales.T, weight.dtype)

    return dataclasses.replace(model, params=jax.tree.map(quantized, model.params))


def pass_times(name: str, form: str, seconds: float) -> list[list[float]]:
    """Seconds of a pass over each of ``WIDTHS`` tokens, turn by turn."""
    import functools

    import jax
    import jax.numpy as jnp

    from specjax._util.platform import compiler_options

    net = load(name, form).net

    @functools.partial(jax.jit, compiler_options=compiler_options())
    def passes(net, cache, tokens):
        def run(turn, carry):
            tokens, cache = carry
            start = jnp.full((1,), 8 * turn, jnp.int32)
            logits, cache, _ = net.logits(cache, tokens, start)
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

        return jax.lax.fori_loop(0, PASSES, run, (tokens, cache))[0]

    cache = net.cache(1, CAPACITY)
    arguments = {width: jnp.ones((1, width), jnp.int32) for width in WIDTHS}
    times = {width: [] for width in WIDTHS}
    for tokens in arguments.values():
        passes(net, cache, tokens).block_until_ready()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for width, tokens in arguments.items():
            begin = time.perf_counter()
            passes(net, cache, tokens).block_until_ready()
            times[width].append((time.perf_counter() - begin) / PASSES)
    return list(times.values())


def peak(name: str, form: str, _: float) -> float:
    """MiB that the process took at most."""
    import specjax as sj

    model = load(name, form)
    sj.generate(model, ["word " * 256], max_new_tokens=32)
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
