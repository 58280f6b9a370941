"""Every drafter with every rule and target distribution: one table drives these tests.

A new part is one entry in a table of ``specjax.registry``. Each pair with it is either refused by
name, or it decodes within the budget and with counters that add up. A lossless pair decodes
greedily as plain decoding does.
"""

import functools
import itertools

import jax
import numpy as np
import pytest

import specjax as sj
from conftest import tiny_draft, tiny_lm
from specjax._util.errors import PairError
from specjax.lm import attach
from specjax.models import init_params
from specjax.models.families.head_config import HeadConfig
from specjax.registry import DRAFTERS, RULES, TARGET_DISTS, Context, compose

PROMPTS = [[1, 2, 3], [4], list(range(5, 45)), [7, 7, 7, 7, 9]]
SAMPLING = sj.Sampling(temperature=0.8, top_k=20, top_p=0.9)
ALL = [(d, r, t) for t in TARGET_DISTS for d in DRAFTERS for r in RULES]
# Small drafts are enough: no assertion depends on their size.
SMALL = {"gamma": 3, "chains": 3, "branching": (2, 2), "width": 3, "depth": 2, "budget": 6}


@functools.cache
def models():
    target = tiny_lm(0)
    return target, tiny_draft(target)


@functools.cache
def draft_for(drafter):
    """The draft model that a drafter runs: a language model, or a head."""
    target, draft = models()
    if drafter != "head":
        return draft
    cfg = HeadConfig.of(target.config, np.arange(0, 97, 2), layer_ids=(0, 1))
    return attach(sj.from_params(cfg, init_params(cfg, jax.random.key(1))), target)


def options(spec):
    return {name: value for name, value in SMALL.items() if name in spec.options}


def is_accepted(pair) -> bool:
    spec = compose(*pair)
    try:
        spec.build(Context(models()[0], draft_for(pair[0])), options(spec))
    except PairError:
        return False
    return True


ACCEPTED = [pair for pair in ALL if is_accepted(pair)]
REFUSED = [pair for pair in ALL if not is_accepted(pair)]
# Under the contrastive target, every drafter with one rule and every rule with one drafter. How a
# drafter and a rule interact does not depend on the target distribution.
DECODED = [
    (drafter, rule, dist)
    for drafter, rule, dist in ACCEPTED
    if dist == "warped" or rule == "match" or drafter == "chain"
]


@functools.cache
def decode_plainly(target_dist):
    """Greedy decoding, token by token, under either target distribution."""
    target, draft = models()
    return sj.generate(
        target,
        PROMPTS,
        draft=draft,
        max_new_tokens=30,
        drafter="none",
        rule="speculative",
        target_dist=target_dist,
    ).tokens


def test_refused_pairs_follow_from_sampling_and_shape():
    """A rule refuses a drafter by how its drafts are sampled, and by their shape."""
    tree_rules = {"spectr", "specinfer", "match", "joint"}
    for drafter, rule, _ in ACCEPTED:
        assert rule in tree_rules or drafter not in ("iid", "tree")
    assert ("beam", "speculative", "warped") in REFUSED
    assert ("tree", "spectr", "warped") in REFUSED
    assert ("iid", "spectr", "contrastive") in ACCEPTED
    assert len(ACCEPTED) + len(REFUSED) == len(ALL)


@pytest.mark.parametrize("pair", REFUSED, ids="-".join)
def test_a_refusal_names_drafter_and_rule(pair):
    spec = compose(*pair)
    with pytest.raises(PairError) as caught:
        spec.build(Context(models()[0], draft_for(pair[0])), options(spec))
    assert pair[0] in str(caught.value) and pair[1] in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def build_or_refusal(spec, values, greedy, draft):
    """The method and its settings, or why the pair is refused."""
    try:
        return spec.build(Context(models()[0], draft, greedy=greedy), values)
    except PairError as error:
        return str(error)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("drafter", "rule"), list(itertools.product(DRAFTERS, RULES)))
def test_names_and_objects_make_the_same_method(drafter, rule, greedy):
    spec = compose(drafter, rule)
    context, as_object = (greedy, draft_for(drafter)), getattr(sj.verify, rule)
    named = build_or_refusal(spec, options(spec), *context)
    assert build_or_refusal(compose(drafter, as_object), options(spec), *context) == named
    if isinstance(named, str) or not isinstance(named[0], sj.DraftVerify):
        return  # refused, or a method of two passes, which has no single drafter
    objects = compose(named[0].drafter, as_object, sj.Warped())
    read = {name: named[1][name] for name in (*as_object.settings, *named[0].drafter.settings)}
    assert build_or_refusal(objects, read, *context) == (named[0], read)


def test_parts_as_objects_decode():
    target, draft = models()
    kw = {"draft": draft, "max_new_tokens": 12, "sampling": SAMPLING}
    objects = (
        (
            {"drafter": "adaptive", "rule": sj.verify.block},
            {"drafter": "adaptive", "rule": "block"},
        ),
        (
            {"drafter": sj.draft.Chain(3, stop="before"), "options": {"tau1": 0.3}},
            {"drafter": "chain", "options": {"gamma": 3, "stop": "before", "tau1": 0.3}},
        ),
        (
            {"drafter": "tree", "target_dist": sj.Contrastive(), "rule": "match"},
            {"drafter": "tree", "target_dist": "contrastive", "rule": "match"},
        ),
    )
    for as_objects, by_name in objects:
        want = sj.generate(target, PROMPTS, **by_name, **kw)
        got = sj.generate(target, PROMPTS, **as_objects, **kw)
        for a, b in zip(got.tokens, want.tokens, strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(sj.OptionError, match="method= has its parts"):
        sj.generate(
            target,
            PROMPTS,
            method=sj.draft_verify(sj.draft.Lookup(), sj.Warped(), sj.verify.match),
            rule="match",
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, marks=() if pair[2] == "warped" else pytest.mark.sweep)
        for pair in DECODED
    ],
    ids="-".join,
)
def test_pair_decodes(pair):
    target = models()[0]
    spec = compose(*pair)
    kw = {
        "draft": draft_for(pair[0]),
        "drafter": pair[0],
        "rule": pair[1],
        "target_dist": pair[2],
        "options": options(spec),
        "max_new_tokens": 30,
    }
    out = sj.generate(target, PROMPTS, **kw)
    # A head as the amateur gives another contrastive p than the draft model.
    if spec.lossless and (pair[0] != "head" or pair[2] == "warped"):
        for got, want in zip(out.tokens, decode_plainly(pair[2]), strict=True):
            np.testing.assert_array_equal(got, want)
    sampled = sj.generate(target, PROMPTS, sampling=SAMPLING, **kw)
    for run in (out, sampled):
        stats = run.stats
        np.testing.assert_array_equal(stats["emitted"], 30)
        # A two-step round may end with its first pass, which tests no draft.
        verified = stats["accepted_hist"].sum(1)
        passes = 2 * stats["rounds"] if pair[0] == "adaptive" else stats["rounds"]
        np.testing.assert_array_equal(verified, stats["target_calls"] - passes + stats["rounds"])
        depth = np.arange(stats["accepted_hist"].shape[1])
        np.testing.assert_array_equal(stats["accepted_hist"] @ depth, stats["accepted"])
        assert (stats["accepted"] <= stats["tested"]).all()
        assert (stats["tested"] <= stats["drafted"]).all()
        assert (stats["emitted"] <= stats["accepted"] + stats["target_calls"]).all()
        assert (stats["target_calls"] <= passes).all()
