"""The variants as models of specjax, and their golden outputs from transformers."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from specjax.models import from_hf, fuse, hidden_states, logits_of
from specjax.models.hf.read import from_tensors
from support import variants

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-4


@functools.cache
def build(name):
    """(config, params, fused params) of a variant."""
    cfg = from_hf(variants.config(name))
    read = functools.partial(variants.weights, std=variants.std(name))
    params = from_tensors(cfg, read, jnp.float32)
    return cfg, params, fuse(params)


@functools.cache
def pair(name):
    """A model that never ends, and its first layer as a draft that often agrees."""
    cfg, params, _ = build(name)
    cfg = dataclasses.replace(cfg, eos_ids=())
    small = cfg.first_layers(1)
    layer = params | {"layers": {"0": params["layers"]["0"]}}
    return sj.from_params(cfg, params), sj.from_params(small, layer)


@functools.cache
def golden_stacks():
    """The arrays that tests/golden/make.py wrote of the variants in support.stack_variants."""
    with np.load(GOLDEN / "stacks.npz") as stored:
        return dict(stored)


@functools.cache
def golden(name):
    """The arrays that tests/golden/make.py wrote."""
    with np.load(GOLDEN / f"{name}.npz") as stored:
        return dict(stored)


def logits(cfg, params, rows, positions, segments, backend):
    hidden = hidden_states(cfg, params, rows, positions, segments, backend=backend).hidden
    return logits_of(cfg, params, hidden)


logits_jit = jax.jit(logits, static_argnums=(0, 5))


def whole(cfg, params, rows, backend, segments=None, positions=None):
    """Logits of whole sequences.

    Op by op where that is possible: variants share the compiled ops, not whole programs.
    """
    if positions is None:
        positions = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
    segments = np.ones_like(rows) if segments is None else segments
    run = logits if backend == "dense" else logits_jit
    return run(cfg, params, rows, positions, segments, backend)


def close(got, want):
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)
