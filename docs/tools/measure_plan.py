"""What ``infer.run --plan batch`` says, beside what a job takes: measure_plan.py DIR [--draft NAME]

Each figure is of a process of its own. The job decodes one batch twice. The peak (VmHWM) of the
second time is counted above what the process held before it, to which the weights are added. It
needs Linux and a CPU.
"""

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path

from measure_load_memory import memory

PROMPT = (
    "The memory of a batch follows from its rows, from the tokens of each, and from the rounds."
)
NEW_TOKENS = 32
SAMPLING = {"temperature": 0.8, "top_p": 0.9}


def main() -> None:
    """Prints a table; with ``--job`` it is one of its own processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("--methods", nargs="+", default=["autoregressive"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(job(args.target, args.draft, args.methods[0], args.batch[0]))
        return
    print(
        "| method | rows | MiB planned | MiB taken | ratio |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for method in args.methods:
        for rows in args.batch:
            planned = plan(args.target, args.draft, method, rows)
            taken = planned["weight_bytes"] / 2**20 + taken_by_job(args, method, rows)
            batch = planned["batch"]
            said = (batch["peak_bytes"] - batch["waiting_bytes"]) / 2**20
            cells = method, rows, f"{said:.0f}", f"{taken:.0f}", f"{said / taken:.2f}"
            print("|", " | ".join(map(str, cells)), "|", flush=True)


def plan(target: str, draft: str | None, method: str, rows: int) -> dict:
    """What the program says."""
    command = [sys.executable, "-m", "infer.run", "--plan", "batch", "--json", "--target", target]
    command += ["--method", method, "--batch-size", str(rows), "--prompt", PROMPT]
    command += ["--max-new-tokens", str(NEW_TOKENS), "--temperature", str(SAMPLING["temperature"])]
    command += ["--top-p", str(SAMPLING["top_p"])]
    if draft:
        command += ["--draft", draft]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def taken_by_job(args: argparse.Namespace, method: str, rows: int) -> float:
    """:func:`job` in a process of its own."""
    command = [sys.executable, __file__, args.target, "--job", "--methods", method]
    command += ["--batch", str(rows)]
    if args.draft:
        command += ["--draft", args.draft]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def job(name: str, draft: str | None, method: str, rows: int) -> float:
    """MiB that a batch takes beside the weights."""
    import specjax as sj
    from specjax._util.memory import return_memory
    from specjax.lm import own_draft
    from specjax.registry import METHODS

    target = sj.load(name)
    model = None
    if draft and METHODS[method].needs_draft:
        model = own_draft(target, draft) if draft.startswith("self:") else sj.load(draft)

    def decode():
        sj.generate(
            target,
            [PROMPT] * rows,
            draft=model,
            method=method,
            max_new_tokens=NEW_TOKENS,
            sampling=sj.Sampling(**SAMPLING),
        )

    decode()
    gc.collect()
    return_memory()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    decode()
    return memory("VmHWM") - before


if __name__ == "__main__":
    main()
