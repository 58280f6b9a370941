"""How many greedy bfloat16 rows of trees differ from plain decoding's, on the embedded models.

python docs/tools/measure_tree_bits.py [--rows N] [--pass-width N]

Prompts are the beginnings of held-out functions, each of another length. The answer is 0 as long as
a tree's nodes fit into ``--pass-width``, on devices where trees have the bits of plain decoding.
"""

from __future__ import annotations

import argparse

import numpy as np

import specjax as sj
from specjax.demo.heldout import held_out_functions

TREE = {"branching": (2, 2, 1)}  # eleven nodes with the root
METHODS = {"specinfer": TREE, "tree-match": TREE, "spectr": {"chains": 2, "gamma": 4}}
SHORTEST = 24  # tokens of a prompt
LENGTHS = 73


def main() -> None:
    """Prints a line for each method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--pass-width", type=int, default=16)
    args = parser.parse_args()
    target = sj.load("demo", dtype="bfloat16", pass_width=args.pass_width)
    draft = sj.load("demo-draft", dtype="bfloat16", pass_width=args.pass_width)
    prompts = beginnings(target, args.rows)
    common = {"max_new_tokens": 32, "batch_size": 8}
    plain = sj.generate(target, prompts, **common)
    for name, options in METHODS.items():
        trees = sj.generate(target, prompts, method=name, draft=draft, options=options, **common)
        pairs = zip(trees.tokens, plain.tokens, strict=True)
        different = sum(not np.array_equal(ours, theirs) for ours, theirs in pairs)
        passes = trees.stats["rounds"].sum() / plain.stats["rounds"].sum()
        print(f"{name}: {different} of {len(prompts)} rows differ, {passes:.2f} of the passes")


def beginnings(target: sj.LM, count: int) -> list[list[int]]:
    """Token ids of ``count`` prompts; where functions repeat, their lengths differ."""
    functions = held_out_functions()[0]
    prompts = []
    for row in range(count):
        tokens = target.tokenizer.encode(functions[row % len(functions)].prompt)
        length = SHORTEST + row * 7 % LENGTHS
        prompts.append(tokens[:length])
    return prompts


if __name__ == "__main__":
    main()
