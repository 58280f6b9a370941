"""Every drafter with every rule and target distribution: one table drives these tests.

A new part is one entry of ``specjax.methods``; each pair it makes is either refused by name or
decodes: greedily as plain decoding does where it is lossless, with counters that add up, and
within budget.
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
# Small drafts: what is tested does not depend on their size.
SMALL = {"gamma": 3, "chains": 3, "branching": (2, 2), "width": 3, "depth": 2, "budget": 6}


@functools.cache
def models():
    target = tiny_lm(0)
    return target, tiny_draft(target)


@functools.cache
def draft_of(drafter):
    """The draft that a drafter takes: a model, or a head."""
    target, draft = models()
    if drafter != "head":
        return draft
    cfg = HeadConfig.of(target.config, np.arange(0, 97, 2), layer_ids=(0, 1))
    return attach(sj.from_params(cfg, init_params(cfg, jax.random.key(1))), target)


def options(spec):
    return {name: value for name, value in SMALL.items() if name in spec.options}


def fits(pair) -> bool:
    spec = compose(*pair)
    try:
        spec.build(Context(models()[0], draft_of(pair[0])), options(spec))
    except PairError:
        return False
    return True


ACCEPTED = [pair for pair in ALL if fits(pair)]
REFUSED = [pair for pair in ALL if not fits(pair)]
# Under the contrastive target every drafter with one rule, and every rule with one drafter: what
# the two do to each other is the same as under the warped one.
DECODED = [
    (drafter, rule, dist)
    for drafter, rule, dist in ACCEPTED
    if dist == "warped" or rule == "match" or drafter == "chain"
]


@functools.cache
def plain(target_dist):
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


def test_the_matrix_is_as_the_rules_say():
    """Which pairs are refused follows from laws and shapes; the count guards the table."""
    tree_rules = {"spectr", "specinfer", "match", "joint"}
    for drafter, rule, _ in ACCEPTED:
        assert rule in tree_rules or drafter not in ("iid", "tree")
    assert ("beam", "speculative", "warped") in REFUSED
    assert ("tree", "spectr", "warped") in REFUSED
    assert ("iid", "spectr", "contrastive") in ACCEPTED
    assert len(ACCEPTED) + len(REFUSED) == len(ALL)


@pytest.mark.parametrize("pair", REFUSED, ids="-".join)
def test_refusal_names_both_sides(pair):
    spec = compose(*pair)
    with pytest.raises(PairError) as caught:
        spec.build(Context(models()[0], draft_of(pair[0])), options(spec))
    assert pair[0] in str(caught.value) and pair[1] in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def outcome(spec, values, greedy, draft):
    """The method and its settings, or why the pair is refused."""
    try:
        return spec.build(Context(models()[0], draft, greedy=greedy), values)
    except PairError as error:
        return str(error)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("drafter", "rule"), list(itertools.product(DRAFTERS, RULES)))
def test_names_and_objects_make_the_same_method(drafter, rule, greedy):
    spec = compose(drafter, rule)
    how, as_object = (greedy, draft_of(drafter)), getattr(sj.verify, rule)
    named = outcome(spec, options(spec), *how)
    assert outcome(compose(drafter, as_object), options(spec), *how) == named
    if isinstance(named, str) or not isinstance(named[0], sj.DraftVerify):
        return  # refused, or two passes: no single drafter stands for them
    objects = compose(named[0].drafter, as_object, sj.Warped())
    read = {name: named[1][name] for name in (*as_object.settings, *named[0].drafter.settings)}
    assert outcome(objects, read, *how) == (named[0], read)


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
    with pytest.raises(sj.OptionError, match="leave drafter="):
        sj.generate(
            target,
            PROMPTS,
            method=sj.draft_verify(sj.draft.Lookup(), sj.Warped(), sj.verify.match),
            rule="match",
        )


@pytest.mark.slow
@pytest.mark.parametrize("pair", DECODED, ids="-".join)
def test_pair_decodes(pair):
    target = models()[0]
    spec = compose(*pair)
    kw = {
        "draft": draft_of(pair[0]),
        "drafter": pair[0],
        "rule": pair[1],
        "target_dist": pair[2],
        "options": options(spec),
        "max_new_tokens": 30,
    }
    out = sj.generate(target, PROMPTS, **kw)
    if spec.lossless and (pair[0] != "head" or pair[2] == "warped"):  # another amateur, another p
        for got, want in zip(out.tokens, plain(pair[2]), strict=True):
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
