"""How fast train.answers writes, relative to the products of its passes alone.

python docs/tools/measure_answers.py MODEL [--batch-size 32,48] [--max-new-tokens 96]
    [--questions 8] [--repeats 3] [--processor-time]

The bound is a pass of B rows that multiplies a vector of each row with every weight of the model
and does nothing else: B tokens in its time. There are --questions for each batch slot. At the end
of a job slots are free, and a job of few questions is mostly its end. A first job, of one question
for each slot, compiles. Each repeat is a job of its own, with another seed, and is compared with
passes before and after it. On a busy machine, --processor-time counts the time of the process
alone: give it one core then (taskset -c 0), as threads that wait for each other count as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax._util.compilation_cache import use_compilation_cache
from specjax._util.program import Place
from train.answers.__main__ import parser as answers_parser
from train.answers.job import AnswerJob, make_job
from train.answers.openings import OPENINGS

TOPICS = ("the sea", "bread", "a library", "music", "the moon", "bees", "a bridge", "sleep")


def main() -> None:
    """One line of figures per batch size."""
    commands = argparse.ArgumentParser(description=__doc__)
    commands.add_argument("model")
    commands.add_argument("--batch-size", default="32,48")
    commands.add_argument("--max-new-tokens", default="96")
    commands.add_argument("--questions", type=int, default=8, help="for each batch slot")
    commands.add_argument("--repeats", type=int, default=3)
    commands.add_argument("--processor-time", action="store_true")
    args = commands.parse_args()
    use_compilation_cache()
    clock = time.process_time if args.processor_time else time.perf_counter
    for size in map(int, args.batch_size.split(",")):
        with tempfile.TemporaryDirectory() as home:
            ratios = []
            speeds = []
            for repeat in range(args.repeats + 1):
                job = job_of(args, size, Path(home), repeat)
                before = products(job.target.params, size, clock)
                speed = measure(job, clock)
                bound = (before + products(job.target.params, size, clock)) / 2
                if repeat:
                    ratios.append(speed / bound)
                    speeds.append(speed)
        spread = f" ± {statistics.stdev(ratios):.2f}" if len(ratios) > 1 else ""
        print(
            f"batch size {size}: {statistics.mean(ratios):.2f}{spread} of the bound "
            f"({statistics.mean(speeds):.0f} tokens/s, last bound {bound:.0f})",
            flush=True,
        )


def job_of(args: argparse.Namespace, size: int, home: Path, repeat: int) -> AnswerJob:
    """A job of its own questions and output; number 0 is the one that compiles."""
    questions = home / "questions.jsonl"
    prompts = []
    for number in range(size * args.questions if repeat else size):
        opening = OPENINGS[number % len(OPENINGS)]
        prompts.append({"prompt": f"{opening} {TOPICS[number % len(TOPICS)]}"})
    questions.write_text("\n".join(map(json.dumps, prompts)))
    words = ["--target", args.model, "--batch-size", str(size), "--seed", str(repeat)]
    words += ["--max-new-tokens", args.max_new_tokens, "--temperature", "1"]
    parsed = answers_parser().parse_args([str(questions), str(home / str(repeat)), *words])
    *parsed.files, out = parsed.paths
    parsed.out = Path(out)
    return make_job(parsed, Place("", 1, 0))


def measure(job: AnswerJob, clock: Callable[[], float]) -> float:
    """Tokens of answers a second."""
    start = clock()
    count = job.run()
    seconds = clock() - start
    sums = job.journal.join(count)
    assert sums is not None, "one process answers all"
    return sums["tokens"] / seconds


def products(params: dict, rows: int, clock: Callable[[], float]) -> float:
    """Tokens a second of passes that are their products alone."""
    weights = [x for x in jax.tree.leaves(params) if x.ndim == 2]
    inputs = {x.shape[1]: jnp.ones((rows, x.shape[1]), x.dtype) for x in weights}

    @jax.jit
    def run(inputs, weights):
        return [jnp.einsum("ni,oi->no", inputs[w.shape[1]], w).sum() for w in weights]

    times = []
    for _ in range(6):
        start = clock()
        jax.block_until_ready(run(inputs, weights))
        times.append(clock() - start)
    return rows / statistics.median(times[1:])


if __name__ == "__main__":
    main()
