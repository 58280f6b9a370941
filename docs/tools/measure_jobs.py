"""Refilled slots and shared prompts against separate batches: python docs/tools/measure_jobs.py

It runs the embedded pair on prompts of the held-out functions, in three parts:

- ``refill``: prompts with lognormal budgets (mean 64, σ 1), 8 batch slots, against batches of 8 by
  prompt length that each run to their end. There is no end of sequence, so that lengths are the
  budgets.
- ``samples``: the time to the first tokens of 8 samples of one prompt of 1,000 tokens, against
  that of one sample.
- ``prefix``: seconds of prefill of 64 prompts with the same first 1,000 tokens, with the prefix
  cache and without. ``--prompts`` may ask for fewer.

Everything is compiled before it is timed, and the two sides take turns.
"""

import argparse
import dataclasses
import time

import numpy as np

import specjax as sj
from specjax.core.types import NO_EOS
from specjax.demo.heldout import held_out_functions

METHODS = {
    "autoregressive": {},
    "speculative": {"gamma": 3},
    "sdsat": {},
    "specinfer": {},
}
MEAN, SIGMA, ROWS, LONG = 64, 1.0, 8, 1000


def main() -> None:
    """Prints one table per part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["refill", "samples", "prefix"])
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    for part in args.parts:
        {"refill": refill, "samples": samples, "prefix": prefix}[part](args)


def endless(name: str) -> sj.LM:
    model = sj.load(name)
    return dataclasses.replace(model, eos_ids=(NO_EOS,) * len(model.eos_ids))


def prompts_of(model: sj.LM, count: int) -> list[np.ndarray]:
    """Held-out functions up to their bodies; they repeat if there are too few."""
    texts = [function.prompt for function in held_out_functions()[0]]
    ids = [np.asarray(model.tokenizer.encode(text)) for text in texts]
    return [ids[i % len(ids)] for i in range(count)]


def refill(args) -> None:
    print("| method | over fixed batches | occupancy | fixed batches' | same tokens |")
    print("| --- | ---: | ---: | ---: | ---: |")
    drawn = np.random.default_rng(0).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, args.prompts)
    for name in args.methods:
        target, draft = endless("demo-sdsat" if name == "sdsat" else "demo"), endless("demo-draft")
        spec, prompts = sj.method(name), prompts_of(target, args.prompts)
        room = target.config.max_position - np.array([len(p) for p in prompts])
        budgets = np.minimum(np.maximum(drawn.astype(int), 1), room)

        def run(chosen, spec=spec, target=target, draft=draft, prompts=prompts, budgets=budgets):
            return sj.generate(
                target,
                [prompts[i] for i in chosen],
                method=spec.name,
                draft=draft if spec.needs_draft else None,
                options=METHODS[spec.name],
                sampling=sj.Sampling(args.temperature),
                max_new_tokens=[int(budgets[i]) for i in chosen],
                indices=list(chosen),
                batch_size=ROWS,
            )

        order = np.argsort([len(prompt) for prompt in prompts], kind="stable")
        batches = [order[first : first + ROWS] for first in range(0, len(order), ROWS)]

        def fixed(run=run, batches=batches):
            return [run(batch) for batch in batches]

        def flowing(run=run, count=args.prompts):
            return run(range(count))

        fixed(), flowing()
        ratios = []
        for _ in range(args.repeats):
            slow, apart = timed(fixed)
            fast, together = timed(flowing)
            ratios.append(slow / fast)
        alone = {
            int(i): row
            for b, out in zip(batches, apart, strict=True)
            for i, row in zip(b, out.tokens, strict=True)
        }
        same = np.mean([np.array_equal(alone[i], row) for i, row in enumerate(together.tokens)])
        live = np.array([out.stats["rounds"].sum() for out in apart])
        held = live.sum() / (live / [out.occupancy for out in apart]).sum()
        print(
            f"| {name} | {np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | "
            f"{together.occupancy:.1%} | {held:.1%} | {same:.1%} |",
            flush=True,
        )


def samples(args) -> None:
    target, prompt = long_prompt()
    print("| method | first tokens of 8 samples over one's |\n| --- | ---: |")

    def first(count):
        out = sj.generate(
            target, [prompt], num_samples=count, max_new_tokens=8, sampling=sj.Sampling(0.8)
        )
        return out.first_token_seconds.max()

    first(1), first(ROWS)
    ratios = [first(ROWS) / first(1) for _ in range(args.repeats)]
    print(f"| autoregressive | {np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |")


def prefix(args) -> None:
    target, shared = long_prompt()
    own = prompts_of(target, min(args.prompts, 64))
    prompts = [np.concatenate([shared, tokens[:24]]) for tokens in own]
    print("| batch slots | with kept prefixes over without | cached tokens |")
    print("| ---: | ---: | ---: |")

    def run(kept):
        # One token each, so that only the prefill and one round are timed.
        return sj.generate(target, prompts, max_new_tokens=1, batch_size=ROWS, prefixes=kept)

    run(4), run(0)
    ratios = []
    for _ in range(args.repeats):
        slow, _ = timed(lambda: run(0))
        fast, out = timed(lambda: run(4))
        ratios.append(fast / slow)
    cached = np.sum(out.cached_tokens) / np.sum(out.prompt_tokens)
    print(
        f"| {ROWS} | {np.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) | "
        f"{cached:.1%} |"
    )


def long_prompt() -> tuple[sj.LM, np.ndarray]:
    """The demo target and 1,000 tokens of held-out functions."""
    target = endless("demo")
    return target, np.concatenate(prompts_of(target, 64))[:LONG]


def timed(run):
    began = time.perf_counter()
    out = run()
    return time.perf_counter() - began, out


if __name__ == "__main__":
    main()
