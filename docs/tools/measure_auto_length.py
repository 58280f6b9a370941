"""Draft lengths chosen by cost against fixed lengths: python docs/tools/measure_auto_length.py

The embedded pair decodes held-out functions and random ids. A draft model of random weights
decodes random ids, too. With ``--experts`` the target is a random mixture of 32 experts, of which
each token chooses two: a small random model drafts for it, and it drafts for itself. All run greedy
and sampled. Speed is new tokens per processor second of the whole call, with prefill and without an
end of sequence (--wall: per second of the clock). Everything is compiled and the costs are measured
before. The methods take turns, and a ratio is the median of the ratios within each repeat.
"""

import argparse
import dataclasses
import time

import jax
import numpy as np

import specjax as sj
from infer.loading import use_compilation_cache
from specjax.core.types import NO_EOS
from specjax.demo.heldout import held_out_functions
from specjax.draft.auto_length import TREES
from specjax.models import ModelConfig, from_hf, init_params

LENGTHS = 1, 2, 4, 8
PROMPT = 48  # tokens


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 0.8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--fixed", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--trees", action="store_true", help="of tree-match, instead of chains")
    parser.add_argument("--experts", action="store_true", help="of a mixture of experts")
    args = parser.parse_args()
    use_compilation_cache()
    target, draft = (
        dataclasses.replace(model, eos_ids=(NO_EOS,) * len(model.eos_ids))
        for model in map(sj.load, ("demo", "demo-draft"))
    )
    lost = dataclasses.replace(draft, params=init_params(draft.config, jax.random.key(0)))
    mixture, small = random_mixture()
    print("| batch | T | text | λ | mean γ | best | auto / best | auto / plain | best / plain |")
    print("| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for batch in args.batches:
        for temperature in args.temperatures:
            if args.experts:
                _, bad = texts(mixture, max(batch, 2))
                for text, q in (("random draft", small), ("its own draft", mixture)):
                    measure(args, mixture, q, batch, temperature, text, bad)
                continue
            good, bad = texts(target, max(batch, 2))
            for text, q, prompts in (
                ("functions", draft, good),
                ("random ids", draft, bad),
                ("random draft", lost, bad),
            ):
                measure(args, target, q, batch, temperature, text, prompts)


def random_mixture() -> tuple[sj.LM, sj.LM]:
    """A mixture of 26M parameters, of which a token uses 3M, and a dense model of 0.6M."""
    sizes = {"vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    sizes |= {"num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    sizes |= {"max_position_embeddings": 4096, "intermediate_size": 512, "eos_token_id": None}
    mixture = from_hf(sizes | {"model_type": "qwen3_moe", "norm_topk_prob": True})
    small = ModelConfig.llama(
        vocab_size=2048,
        hidden_size=128,
        num_layers=1,
        num_heads=4,
        intermediate_size=256,
        max_position=4096,
    )
    models = []
    for seed, cfg in enumerate((mixture, small)):
        models.append(sj.from_params(cfg, init_params(cfg, jax.random.key(seed))))
    return models[0], models[1]


def texts(target: sj.LM, count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Prompts of both kinds: as many of each, of similar length."""
    generator = np.random.default_rng(0)
    good = []
    if target.tokenizer is not None:
        functions = [target.tokenizer.encode(f.prompt) for f in held_out_functions()[0]]
        good = [np.asarray(ids[:PROMPT]) for ids in functions[:count]]
    bad = [generator.integers(1, target.vocab_limit, PROMPT) for _ in range(count)]
    return good, bad


def measure(args, target, draft, batch, temperature, text, prompts) -> None:
    """One row of the table."""
    sampling = sj.Sampling(temperature, top_p=0.9 if temperature else 1.0)

    method, size = ("tree-match", "branching") if args.trees else ("speculative", "gamma")

    def run(value):
        how = {"method": method, "draft": draft, "options": {size: value}}
        clock = time.perf_counter if args.wall else time.process_time
        began = clock()
        out = sj.generate(
            target,
            prompts,
            max_new_tokens=args.new_tokens,
            sampling=sampling,
            batch_size=batch,
            **(how if value else {}),
        )
        return out.lengths.sum() / (clock() - began), out

    fixed = TREES[1:] if args.trees else tuple(args.fixed)
    sides = [(), *fixed, "auto"]
    for side in sides:
        run(side)
    speeds = {side: [] for side in sides}
    for _ in range(args.repeats):
        for side in sides:
            speed, out = run(side)
            speeds[side].append(speed)
            if side == fixed[-1]:
                rate = out.stats["accepted"].sum() / out.stats["tested"].sum()
    mean = out.stats["drafted"].sum() / out.stats["rounds"].sum()
    middle = {side: np.median(speeds[side]) for side in sides}
    best = max(fixed, key=middle.get)
    ratios = [
        np.median(np.divide(speeds[one], speeds[other]))
        for one, other in (("auto", best), ("auto", ()), (best, ()))
    ]
    print(
        f"| {batch} | {temperature} | {text} | {rate:.2f} | {mean:.1f} | {best} | "
        + " | ".join(f"{ratio:.2f}" for ratio in ratios)
        + " |",
        flush=True,
    )


if __name__ == "__main__":
    main()
