"""A new head starts near the uniform distribution, whatever the scale of its target's logits."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import ModelConfig, init_params
from specjax.models.families.head_config import HeadConfig
from train.data.packing import IGNORE
from train.head.losses import HeadObjective, head_loss
from train.head.starting import first_params

VOCAB = 61
T = 24


def first_kl(scale, ids):
    """KL of the first step in nats per token; the target's norm has this scale."""
    target = ModelConfig.llama(
        vocab_size=VOCAB, hidden_size=32, num_layers=3, num_heads=2, intermediate_size=48
    )
    params = init_params(target, jax.random.key(0))
    params["norm"] = jax.tree.map(lambda x: scale * x, params["norm"])
    head = HeadConfig.of(target, ids, own_embedding=False, verifier="", layer_ids=(0, 1, 2))
    tokens = np.random.default_rng(0).integers(0, VOCAB, (4, T)).astype(np.int32)
    batch = {
        "tokens": tokens,
        "labels": np.concatenate([tokens[:, 1:], np.full((4, 1), IGNORE, np.int32)], 1),
        "segments": np.ones((4, T), np.int32),
        "positions": np.tile(np.arange(T, dtype=np.int32), (4, 1)),
    }
    loss = head_loss(target, head, HeadObjective(steps=2))
    _, _, extras = loss(first_params(head, None, target, params, 0), params, batch)
    total, count = extras["kl"]
    return float(jnp.mean(total / count))


@pytest.mark.parametrize("ids", [None, np.arange(0, VOCAB, 2)])
@pytest.mark.parametrize("scale", [1.0, 40.0, 200.0])
def test_a_new_head_starts_no_worse_than_uniform(scale, ids):
    size = VOCAB if ids is None else len(ids)
    # The mean of log Σ exp of logits with a standard deviation of 1 is ln V + 1/2.
    assert first_kl(scale, ids) < math.log(size) + 0.75
