"""Tokens and counters of every method on two tiny random models: python -m golden.methods

Run it from the repository's root with ``PYTHONPATH=.:tests``. A change that keeps the methods'
behavior must give the same file. Batch size and devices do not matter.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np

import specjax as sj
from support.lengths import fixed_lengths

FILE = Path(__file__).with_name("methods.json")
SAMPLINGS = {"greedy": sj.Sampling(), "sampled": sj.Sampling(0.9, top_p=0.9)}
NEW_TOKENS = 24


def models() -> tuple[sj.LM, sj.LM]:
    """A target, and its first layer as the draft."""
    from conftest import tiny_lm

    target = tiny_lm(0)
    config = dataclasses.replace(target.config, num_layers=1, adaptive_ids=())
    params = target.params | {"layers": {"0": target.params["layers"]["0"]}}
    return target, dataclasses.replace(target, config=config, params=params)


def prompts() -> list[list[int]]:
    """Twenty prompts of 1 to 59 tokens."""
    rng = np.random.Generator(np.random.Philox(5))
    return [rng.integers(0, 97, int(n)).tolist() for n in rng.integers(1, 60, 20)]


def modes(name: str) -> list[str]:
    """The keys of SAMPLINGS that a method takes: reward-guided ones are greedy."""
    return ["greedy"] if sj.method(name).needs_reward else list(SAMPLINGS)


def run(name: str, mode: str, batch_size: int, pair: tuple[sj.LM, sj.LM]) -> dict:
    """Tokens and counters of one method, as the file holds them."""
    target, draft = pair
    spec = sj.method(name)
    out = sj.generate(
        target,
        prompts(),
        method=name,
        draft=draft if spec.needs_draft else None,
        max_new_tokens=NEW_TOKENS,
        sampling=SAMPLINGS[mode],
        seed=3,
        options=fixed_lengths(name),
        batch_size=batch_size,
        reward="length:5-9" if spec.needs_reward else None,
    )
    # Suffix drafts also come from other running requests, so its counters depend on the batch.
    counters = {} if name == "suffix" else out.stats
    stats = {counter: values.tolist() for counter, values in counters.items()}
    return {"tokens": [row.tolist() for row in out.tokens], "stats": stats}


def main() -> None:
    pair = models()
    lines = [
        f"{json.dumps(f'{name} {mode}')}: {json.dumps(run(name, mode, 8, pair))}"
        for name in sj.methods()
        for mode in modes(name)
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
