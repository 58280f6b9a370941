"""What quantization changes in a model: python docs/tools/measure_quantized.py [SCHEME ...]

It runs the demo target in float32. It prints held-out bits per byte for each scheme, and for keys
and values in 8 bits, relative to those of the plain weights; all are read through a cache, as in
decoding. It also prints how many of the tested draft tokens pass if the draft is the target's own
copy, greedy and at temperature 0.8, top-p 0.9. The copies run with their weights dequantized. Tests
check that this is the same model, and on CPUs it is faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from infer.cli import whole
from specjax.demo.heldout import held_out_functions
from specjax.models.quantization import param_bytes, parse_scheme
from specjax.models.quantized import is_quantized

LENGTH = 256  # tokens of a function that are scored
PIECE = 64  # tokens of a pass


def main() -> None:
    """One row per scheme."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schemes", nargs="*", default=["int8", "fp8", "int4"])
    parser.add_argument("--functions", type=whole(1), default=64, metavar="N", help="scored")
    parser.add_argument("--prompts", type=whole(1), default=16, metavar="N", help="continued")
    parser.add_argument("--new-tokens", type=whole(1), default=64, metavar="N")
    args = parser.parse_args()
    target = sj.load("demo", dtype="float32")
    functions, _ = held_out_functions(max(args.functions, args.prompts))
    texts = [f.prompt + f.reference for f in functions[: args.functions]]
    prompts = [f.prompt for f in functions[: args.prompts]]
    whole_bits = bits_per_byte(target, texts)
    print("| scheme | MB | bits per byte | over float32 | greedy | sampled |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    size = param_bytes(target.config, jnp.float32)
    print(f"| float32 | {size / 1e6:.2f} | {whole_bits:.4f} |  |  |  |", flush=True)
    bits = bits_per_byte(dataclasses.replace(target, cache_dtype="int8"), texts)
    print(f"| int8 cache |  | {bits:.4f} | {bits / whole_bits - 1:+.2%} |  |  |", flush=True)
    for scheme in args.schemes:
        copy = dequantised(sj.quantize(target, scheme))
        bits = bits_per_byte(copy, texts)
        size = param_bytes(target.config, jnp.float32, parse_scheme(scheme))
        rates = [
            acceptance(target, copy, prompts, sampling, args.new_tokens)
            for sampling in (sj.Sampling(), sj.Sampling(0.8, top_p=0.9))
        ]
        shown = " | ".join(f"{rate:.3f}" for rate in rates)
        change = bits / whole_bits - 1
        print(f"| {scheme} | {size / 1e6:.2f} | {bits:.4f} | {change:+.2%} | {shown} |", flush=True)


def dequantised(model: sj.LM) -> sj.LM:
    def dense(x):
        return x.dense(jnp.float32) if is_quantized(x) else x

    params = jax.tree.map(dense, model.params, is_leaf=is_quantized)
    return dataclasses.replace(model, params=params)


def bits_per_byte(model: sj.LM, texts: list[str]) -> float:
    """Bits per byte of the texts' first tokens, each text alone."""
    nats = size = 0.0
    for text in texts:
        ids = np.asarray(model.tokenizer.encode(text))[:LENGTH]
        row = np.pad(ids, (0, LENGTH - len(ids)))[None]
        scored = log_probs(model.net, jnp.asarray(row))[: len(ids) - 1]
        nats -= float(np.take_along_axis(np.asarray(scored), ids[1:, None], axis=1).sum())
        size += len(model.tokenizer.decode(ids[1:]).encode())
    return nats / math.log(2) / size


@jax.jit
def log_probs(net: sj.Net, row: jax.Array) -> jax.Array:
    """Log-probabilities after each token of one row, read chunk by chunk through a cache."""

    def piece(cache, at):
        tokens = jax.lax.dynamic_slice_in_dim(row, at, PIECE, axis=1)
        logits, cache, _ = net.logits(cache, tokens, at[None])
        return cache, jax.nn.log_softmax(logits[0])

    starts = jnp.arange(0, row.shape[1], PIECE)
    return jnp.concatenate(jax.lax.scan(piece, net.cache(1, row.shape[1]), starts)[1])


def acceptance(target, draft, prompts, sampling: sj.Sampling, tokens: int) -> float:
    """Accepted over tested draft tokens; checks that greedy output equals plain decoding."""
    settings = {"max_new_tokens": tokens, "sampling": sampling, "options": {"gamma": 4}}
    out = sj.generate(target, prompts, method="speculative", draft=draft, **settings)
    if sampling.temperature == 0:
        plain = sj.generate(target, prompts, max_new_tokens=tokens)
        assert all(map(np.array_equal, plain.tokens, out.tokens)), "greedy output differs"
    return float(out.stats["accepted"].sum() / out.stats["tested"].sum())


if __name__ == "__main__":
    main()
