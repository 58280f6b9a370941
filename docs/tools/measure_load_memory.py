"""The peak of memory while a model loads: python docs/tools/measure_load_memory.py DIR|FILE.gguf

Each load is a process of its own, which loads the model twice. The peak (VmHWM) of each load is
relative to the bytes that are kept, above what the process held before. The first load compiles the
programs that it needs, about 50 MB whatever the model. It needs Linux.
"""

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path

FORMS = (("float32", ""), ("bfloat16", ""), ("float32", "int8"), ("float32", "int4"))
GGUF_FORMS = (("float32", ""), ("float32", "none"), ("float32", "int8"), ("float32", "int4"))


def main() -> None:
    """Prints a table, or measures one form in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("dtype", nargs="?")
    parser.add_argument("scheme", nargs="?", default="")
    args = parser.parse_args()
    if args.dtype:
        print(json.dumps(measured(args.directory, args.dtype, args.scheme)))
        return
    print("| dtype | quantize | MiB kept | peak, first load | second |")
    print("| --- | --- | ---: | ---: | ---: |")
    for dtype, scheme in GGUF_FORMS if args.directory.endswith(".gguf") else FORMS:
        row = child(args.directory, dtype, scheme)
        ratios = [f"{ratio:.2f}" for ratio in row["ratios"]]
        print("|", " | ".join([dtype, scheme, f"{row['kept']:.0f}", *ratios]), "|", flush=True)


def child(directory, dtype: str, scheme: str = "") -> dict:
    """:func:`measured` in a process of its own."""
    command = [sys.executable, __file__, str(directory), dtype, scheme]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured(directory: str, dtype: str, scheme: str) -> dict:
    """MiB kept, and the peaks of two loads relative to that."""
    import jax
    import jax.numpy as jnp

    from specjax._util.memory import return_memory
    from specjax.models.loading import load_params

    jnp.zeros(1).block_until_ready()
    kept = 0.0
    ratios = []
    for _ in range(2):
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        path = Path(directory)
        _, params = load_params(path, jnp.dtype(dtype), quantize=scheme or None)
        leaves = jax.tree.leaves(params)
        sizes = [x.size / 2 if "int4" in x.dtype.name else x.nbytes for x in leaves]
        kept = sum(sizes) / 2**20
        ratios.append((memory("VmHWM") - before) / kept)
        del params
        gc.collect()
        return_memory()  # what was freed is not counted as held before
    return {"kept": kept, "ratios": ratios}


def memory(name: str) -> float:
    """One of the figures of /proc/self/status, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) / 1024


if __name__ == "__main__":
    main()
