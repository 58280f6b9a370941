"""The embedded pair: sizes, greedy equality on held-out code, acceptance, the contributed rule."""

import re
from pathlib import Path

import numpy as np
import pytest

import laws
import specjax as sj
from infer.measure import mismatches
from specjax.demo.heldout import held_out_functions
from specjax.lm import DEMO
from specjax.types import POINT_MASS
from test_laws import point_mass_draft

ACCEPTANCE = 0.7  # the shipped draft reaches 0.87
NEAR_TIE = 1e-4  # top-2 logit gap below which float32 passes of two widths may disagree


@pytest.fixture(scope="module")
def pair():
    return sj.load("demo"), sj.load("demo-draft")


@pytest.fixture(scope="module")
def prompts(pair):
    functions, _ = held_out_functions(200)
    return [pair[0].tokenizer.encode(function.prompt) for function in functions]


def test_sizes(pair):
    target, draft = pair
    assert target.config.num_params <= 10e6
    assert draft.config.num_params <= 1.5e6
    assert sum(f.stat().st_size for f in DEMO.rglob("*.safetensors")) <= 30e6
    assert target.tokenizer.difference(draft.tokenizer) is None


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 8])
def test_speculative_is_plain_greedy_on_held_out_functions(pair, prompts, batch_size):
    target, draft = pair
    plain = sj.generate(target, prompts, max_new_tokens=32, batch_size=8)
    fast = sj.generate(target, prompts, method="speculative", draft=draft, max_new_tokens=32,
                       batch_size=batch_size, options={"gamma": 3})  # fmt: skip
    differ = mismatches(target, prompts, plain.tokens, fast.tokens)
    assert all(row["gap"] < NEAR_TIE for row in differ), differ
    acceptance = fast.stats["accepted"].sum() / fast.stats["tested"].sum()
    assert acceptance >= ACCEPTANCE


@pytest.mark.slow
@pytest.mark.torch
def test_greedy_is_transformers_greedy_on_held_out_functions(pair, prompts):
    pytest.importorskip("torch")
    from infer import peer_transformers
    from specjax.lm import EMBEDDED

    model = peer_transformers.load(str(EMBEDDED["demo"]))
    theirs = peer_transformers.decode(model, prompts, 24)["tokens"]
    ours = sj.generate(pair[0], prompts, max_new_tokens=24, batch_size=8)
    differ = mismatches(pair[0], prompts, ours.tokens, [np.array(t) for t in theirs])
    assert all(row["gap"] < NEAR_TIE for row in differ), differ


def test_text_reads_as_python(pair, prompts):
    out = sj.generate(pair[0], prompts[:16], max_new_tokens=64, batch_size=16)
    text = "\n".join(out.text)
    assert len(re.findall(r"^ +(if|for|return|self\.|raise|try|def|while|\w+ =)", text, re.M)) > 30


def test_the_rule_of_contributing_works_as_printed():
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    source = re.search(r"```python\n(.*?)```", text, re.S).group(1)
    assert len(source.strip().splitlines()) <= 30
    namespace = {}
    exec(source, namespace)
    rule = namespace["certain"]
    assert rule.laws == {POINT_MASS}
    assert laws.rule_p_value(rule, draft_fn=point_mass_draft) > laws.ALPHA
