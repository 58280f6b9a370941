"""Shared fixtures: tiny random models whose greedy output varies."""

import jax
import pytest

import specjax as sj
from specjax.models import ModelConfig, init_params

EOS = 96


def tiny_lm(seed: int, layers: int = 2, hidden: int = 32, vocab: int = 97, **other) -> sj.LM:
    """A random model; scaled up so that its distributions are far from uniform."""
    cfg = ModelConfig.llama(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=48,
        max_position=512,
        **other,
    )
    params = init_params(cfg, jax.random.key(seed))
    params["layers"] = jax.tree.map(lambda x: 4 * x, params["layers"])
    params["embed"] = params["embed"] * 20
    return sj.from_params(cfg, params)


@pytest.fixture(scope="session")
def target() -> sj.LM:
    return tiny_lm(0)


@pytest.fixture(scope="session")
def draft(target) -> sj.LM:
    """The target's first layer alone: it agrees with the target often, not always."""
    cfg = ModelConfig.llama(
        vocab_size=97,
        hidden_size=32,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=48,
        max_position=512,
    )
    layers = {"0": target.params["layers"]["0"]}
    return sj.LM(cfg, target.params | {"layers": layers}, None, (), 97, "draft")
