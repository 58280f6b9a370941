"""Classifier-free guidance: transformers' tokens, the law under drafts, wrong arguments."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from test_laws import PROMPT, SAMPLING, L, tiny_pair
from test_sampling import PROMPTS, pair, tiny

import specjax as sj
from specjax.models import save_pretrained
from specjax.runtime.engine import Engine
from specjax.target.guided import guide
from support import laws

SCALE = 1.8
NEGATIVE = (2, 0, 1, 3)
NEGATIVES = {"the prompt's last token": (), "a negative prompt": (11, 30, 9, 22)}
METHODS = {
    "chain": {"options": {"gamma": 3}},
    "tree": {"options": {"branching": (2, 2)}, "rule": "specinfer"},
    "lookup": {"options": {"gamma": 6}},
}


def decode(target_dist, drafter, options, **how):
    target, draft = pair()
    return sj.generate(
        target,
        list(PROMPTS[:8]),
        drafter=drafter,
        draft=draft if drafter in ("chain", "tree") else None,
        target_dist=target_dist,
        options=options | {"guidance_scale": SCALE},
        max_new_tokens=40,
        **how,
    )


@functools.cache
def plain(negative):
    return decode(sj.Guided(negative), "none", options={}, batch_size=8)


@pytest.mark.torch
@pytest.mark.parametrize("negative", NEGATIVES)
def test_greedy_tokens_are_those_of_transformers(negative, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    ids = NEGATIVES[negative]
    save_pretrained(tmp_path, *tiny(2))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for prompt, ours in zip(PROMPTS[:8], plain(ids).tokens, strict=True):
        how = {"negative_prompt_ids": torch.tensor([ids])} if ids else {}
        theirs = model.generate(
            torch.tensor(prompt[None]),
            guidance_scale=SCALE,
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=list(pair()[0].eos_ids),
            pad_token_id=0,
            **how,
        )
        assert ours.tolist() == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("negative", NEGATIVES)
def test_greedy_tokens_are_those_of_whole_rows(negative):
    """Both sequences scored as whole rows, without a cache, at every step."""
    target, _ = pair()
    ids = NEGATIVES[negative]
    number = int(plain(ids).lengths.argmax())  # the row that ends last
    prompt = PROMPTS[number].tolist()
    row, other = list(prompt), list(ids or prompt[-1:])
    made = plain(ids).tokens[number].tolist()
    assert len(made) >= 10
    for token in made[:10]:
        c, u = (laws.logits_of_texts(target, np.array([text]))[0, -1] for text in (row, other))
        assert int(guide(c, u, SCALE).argmax()) == token
        row.append(token)
        other.append(token)


@pytest.mark.parametrize(
    ("drafter", "negative"),
    [
        ("chain", ()),
        ("tree", NEGATIVES["a negative prompt"]),
        pytest.param("lookup", NEGATIVES["a negative prompt"], marks=pytest.mark.slow),
    ],
    ids=METHODS,
)
def test_drafts_change_no_greedy_token(drafter, negative):
    """Two slots for eight rows: slots are filled again, and rows have unequal lengths."""
    made = decode(sj.Guided(negative), drafter, **METHODS[drafter], batch_size=2)
    for got, want in zip(made.tokens, plain(negative).tokens, strict=True):
        assert got.tolist() == want.tolist()
    assert made.stats["accepted"].sum() > 0


def test_a_long_negative_prompt_fits_whatever_the_prompts_length():
    """Two slots for three rows: the third prompt is prefilled in a state of its own."""
    negative = tuple(np.random.default_rng(0).integers(8, 40, 300).tolist())
    target = pair()[0]
    config = dataclasses.replace(target.config, max_position=512)
    target = dataclasses.replace(target, config=config)
    how = {
        "target_dist": sj.Guided(negative),
        "options": {"guidance_scale": SCALE},
        "max_new_tokens": [12, 4, 8],
    }
    in_turn = sj.generate(target, list(PROMPTS[:3]), batch_size=2, **how)
    together = sj.generate(target, list(PROMPTS[:3]), batch_size=3, **how)
    for got, want in zip(in_turn.tokens, together.tokens, strict=True):
        assert got.tolist() == want.tolist()


def test_a_round_counts_two_target_passes():
    stats = plain(()).stats
    np.testing.assert_array_equal(stats["target_calls"], 2 * stats["rounds"])


def test_scale_one_is_the_target_itself():
    target, _ = pair()
    how = {"max_new_tokens": 12}
    one = sj.generate(
        target, list(PROMPTS[:2]), target_dist="guided", options={"guidance_scale": 1.0}, **how
    )
    unguided = sj.generate(target, list(PROMPTS[:2]), **how)
    assert [row.tolist() for row in one.tokens] == [row.tolist() for row in unguided.tokens]


def test_what_one_side_excludes_stays_excluded():
    c = jnp.array([0.0, -jnp.inf, 1.0, 2.0])
    u = jnp.array([0.0, 3.0, -jnp.inf, 1.0])
    scores = guide(c, u, jnp.float32(2.0))
    assert np.isneginf(np.asarray(scores)).tolist() == [False, True, True, False]
    assert not np.isnan(scores).any()


def guided_law(negative) -> np.ndarray:
    """The distribution of L tokens after the prompt, by enumeration of all continuations."""
    target, _ = tiny_pair()
    grid, with_prompt = laws.continuation_logits(target, PROMPT, L)
    _, without = laws.continuation_logits(target, negative or PROMPT[-1:], L)
    return laws.continuation_law(target, grid, guide(with_prompt, without, SCALE), SAMPLING)


def counts(target_dist, drafter, rule):
    method = sj.draft_verify(drafter, target_dist, rule)
    engine = Engine(*tiny_pair(), method, {"guidance_scale": SCALE})
    return laws.continuation_counts(engine, PROMPT, L, SAMPLING)


CHAIN = sj.draft.Chain(gamma=2)
TREE = sj.draft.Tree(branching=(3,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "rule", "negative"),
    [
        (CHAIN, sj.verify.speculative, ()),
        (TREE, sj.verify.specinfer, NEGATIVE),
        pytest.param(CHAIN, sj.verify.block, NEGATIVE, marks=pytest.mark.sweep),
    ],
    ids=["speculative", "specinfer", "block"],
)
def test_sampled_output_has_the_guided_law(drafter, rule, negative):
    law = guided_law(negative)
    assert np.sum(law > 1e-3) > 15, "the tiny model must leave room for errors to show"
    assert laws.p_value(counts(sj.Guided(negative), drafter, rule), law) > laws.ALPHA


class PromptCounted(sj.Guided):
    """A mutant: the tokens stand after the negative prompt as far as after the prompt."""

    def _root_position(self, state):
        return super()._root_position(state) + 1


class PathLeft(sj.Guided):
    """A mutant: a tree's accepted path is left where it was scored."""

    def commit(self, inputs, state, carried, draft, verdict):
        return carried


@pytest.mark.parametrize("mutant", [PromptCounted, PathLeft])
def test_mutant_is_caught(mutant):
    negative = NEGATIVES["a negative prompt"]
    made = decode(mutant(negative), "tree", **METHODS["tree"], batch_size=2)
    wanted = plain(negative).tokens
    assert any(a.tolist() != b.tolist() for a, b in zip(made.tokens, wanted, strict=True))


@pytest.mark.parametrize(
    ("target_dist", "says"),
    [
        (lambda: sj.Guided((99,)), "token 99 is not among the target's"),
        (lambda: sj.Guided((-1,)), "negative=(-1,): expected token ids"),
        (lambda: sj.Guided("text"), "negative=text: expected token ids"),
        (
            lambda: sj.Guided((9,) * 100),
            "has 100 tokens and 64 new ones to come, the context of target params holds 128; "
            "shorten it, or ask for 28 new ones",
        ),
        (lambda: sj.Guided((9,) * 128), "holds 128; shorten it"),
    ],
)
def test_wrong_negative_prompts_are_one_line(target_dist, says):
    with pytest.raises(sj.SpecjaxError) as caught:
        sj.generate(
            pair()[0], [PROMPTS[0]], target_dist=target_dist(), options={"guidance_scale": 2.0}
        )
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_text_needs_a_tokenizer():
    with pytest.raises(sj.SpecjaxError, match="has no tokenizer for negative_prompt=Paris"):
        sj.generate(
            pair()[0], [PROMPTS[0]], target_dist="guided", options={"negative_prompt": "Paris"}
        )


def test_a_text_is_the_negative_prompt():
    target = sj.load("demo")
    how = {"target_dist": "guided", "max_new_tokens": 8}
    text = "import os\n"
    by_text = sj.generate(target, ["def f(x):"], options={"negative_prompt": text}, **how)
    ids = target.tokenizer.encode(text)
    by_ids = sj.generate(
        target,
        ["def f(x):"],
        target_dist=sj.Guided(ids),
        options={"guidance_scale": 1.5},
        max_new_tokens=8,
    )
    assert by_text.text == by_ids.text
