"""SDSAT with gated adapters is lossless with respect to the base model."""

import dataclasses
import importlib

import jax
import numpy as np
import pytest

import specjax as sj
from specjax.models.adapters import LowRank, attach_adapters
from specjax.registry import Context
from specjax.runtime.engine import Engine
from support import laws
from support.gated import base_and_gated

PROMPTS = [[1, 2, 3], [4], [0, 3, 3, 1, 2, 0, 4], [2, 2]]
SAMPLING, L = sj.Sampling(temperature=0.9, top_k=4), 3


@pytest.fixture(scope="module")
def pair():
    return base_and_gated()


@pytest.mark.parametrize("method", ["sdsat", "sdsat-single"])
def test_greedy_output_is_the_bases(pair, method):
    base, own = pair
    plain = sj.generate(base, PROMPTS, max_new_tokens=40)
    out = sj.generate(own, PROMPTS, method=method, max_new_tokens=40, options={"k": 4})
    for a, b in zip(out.tokens, plain.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    assert out.stats["accepted"].sum() > 0, "some draft must stand for this to test anything"


def build(own, **options):
    rule = options.pop("rule")
    context = Context(own, None, greedy=False)
    return sj.compose("adaptive", rule).build(context, options)[0]


def p_value(base, own, built):
    """The p-value of ``built``'s samples on ``own`` against the base's distribution."""
    law = laws.continuation_law(base, *laws.continuation_logits(base, PROMPTS[0], L), SAMPLING)
    counts = laws.continuation_counts(Engine(own, None, built, {}), PROMPTS[0], L, SAMPLING)
    return laws.p_value(counts, law)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"k": 2, "form": "chain", "rule": "speculative"},
        {"k": 2, "rule": "match"},
        {"k": 2, "single": True, "rule": "speculative"},
    ],
    ids=["two-step chain", "two-step tree", "single pass"],
)
def test_sampled_output_has_the_bases_law(pair, options):
    assert p_value(*pair, build(pair[1], **options)) > laws.ALPHA


@pytest.mark.slow
def test_a_gate_that_is_open_for_clean_tokens_is_caught(monkeypatch):
    # A separate model, so that the traces of other tests are not reused.
    base, own = base_and_gated(norm_eps=2e-5)

    def leaky(cfg, params, tokens):
        def opened(x):
            is_pair = isinstance(x, LowRank)
            return dataclasses.replace(x, gate=np.ones(tokens.shape, bool)) if is_pair else x

        held = attach_adapters(cfg, params, tokens)
        return jax.tree.map(opened, held, is_leaf=lambda x: isinstance(x, LowRank))

    module = importlib.import_module("specjax.models.forward_pass")
    monkeypatch.setattr(module, "attach_adapters", leaky)
    built = build(own, k=2, form="chain", rule="speculative")
    assert p_value(base, own, built) < laws.ALPHA
