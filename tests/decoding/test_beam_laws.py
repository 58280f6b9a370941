"""Exact distributions of sampled beams, beam drafts and MTJD's blocks, and mutants of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax._util.errors import OptionError
from specjax.core import loop, probs
from specjax.core.warp import draw_joint, warp_joint
from specjax.models import ModelConfig, init_params, save_pretrained
from specjax.registry import Context
from specjax.runtime.engine import Engine
from specjax.search import MTJD, beam
from support import beam_laws, laws
from support.beam_laws import RULES, Rule

V, W, LENGTH, END = 3, 2, 3, 2
PAD = V  # no token of the model
PROMPT = (1, 0, 1)
ROWS, BATCHES = 16384, 2
# Under "cold" all rules differ clearly. "hot" truncates conditionals as well as joints.
SAMPLINGS = {
    "cold": sj.Sampling(temperature=0.5, top_k=4, top_p=0.97),
    "hot": sj.Sampling(temperature=2.5, top_k=4, top_p=0.8),
}
CASES = [("cold", (END,)), ("hot", (END,)), ("hot", ())]


@functools.cache
def config() -> tuple[ModelConfig, dict]:
    cfg = ModelConfig.llama(
        vocab_size=V,
        hidden_size=8,
        num_layers=1,
        num_heads=2,
        intermediate_size=16,
        max_position=64,
    )
    params = init_params(cfg, jax.random.key(4))
    # The scale is large enough that the prefix matters, and small enough that no token is rare.
    params["layers"] = jax.tree.map(lambda x: 12 * x, params["layers"])
    params["embed"] = params["embed"] * 30
    params["norm"] = {"weight": params["norm"]["weight"] / 2}
    return cfg, params


@functools.cache
def tiny(ends=()) -> sj.LM:
    return dataclasses.replace(sj.from_params(*config()), eos_ids=ends)


@functools.cache
def table() -> dict:
    return beam_laws.table_of(tiny(), PROMPT, LENGTH)


def build(name, **options):
    return sj.method(name).build(Context(tiny(), tiny()), options)[0]


SETTINGS = {"tau": 0.1, "length_penalty": 1.0}


def starts(method, sampling, ends):
    """Inputs and fresh states, batch by batch; small capacity, because beams copy their cache."""
    inputs = Engine(tiny(ends), tiny(ends), method, SETTINGS).inputs(sampling, ROWS)
    tokens = np.zeros((ROWS, len(PROMPT) + LENGTH + method.round_positions), np.int32)
    tokens[:, : len(PROMPT)] = PROMPT
    length = np.full(ROWS, len(PROMPT), np.int32)
    fill = loop.prefill_prompts(method, chunk=4, logprobs=False)
    for seed in range(BATCHES):
        keys = jax.random.split(jax.random.key(seed), ROWS)
        yield inputs, fill(inputs, tokens, length, length + LENGTH, keys)


def p_value(counts: dict, law: dict) -> float:
    """As :func:`laws.p_value`, for dicts that map an outcome to its count or probability."""
    outcomes = sorted(counts.keys() | law.keys())
    seen, want = (np.array([d.get(o, 0) for o in outcomes], float) for d in (counts, law))
    return laws.p_value(seen, want)


def counted(batches) -> dict:
    """Counts of each outcome; a batch is int ``[rows, ...]`` with −1 for no token."""
    rows = np.concatenate([np.asarray(b).reshape(len(b), -1) for b in batches])
    outcomes, counts = np.unique(rows, axis=0, return_counts=True)
    return {tuple(o.tolist()): int(n) for o, n in zip(outcomes, counts, strict=True)}


def lawful(law: dict, of) -> dict:
    """The distribution of ``of(outcome)``, with outcomes written as in :func:`counted`."""

    def code(outcome):
        return tuple(
            token
            for tokens, size in of(outcome)
            for token in (*tokens, *[-1] * (size - len(tokens)))
        )

    return beam_laws.sequences(law, code)


def emitted(state):
    """The new tokens of each row, int ``[rows, LENGTH]``, −1 past its end."""
    at = len(PROMPT) + np.arange(LENGTH)
    return np.where(at < np.asarray(state.length)[:, None], np.asarray(state.tokens)[:, at], -1)


def running(state):
    """The two tokens of each running hypothesis after two rounds, in beam order; −1 if dead."""
    found = state.method_state.running
    tokens = np.asarray(found.tokens)[:, :, len(PROMPT) : len(PROMPT) + 2]
    dead = np.asarray((found.score < beam.LOST / 2) | state.done[:, None])
    return np.where(dead[..., None], -1, tokens)


def padded(hypotheses, size):
    tokens = [tokens for _, tokens in hypotheses]
    return [(t, size) for t in (*tokens, *[()] * (W - len(tokens)))]


@functools.cache
def search_counts(method, sampling, ends) -> tuple[dict, dict]:
    """Counts of the running hypotheses after two rounds, and of the final output."""
    kept, out = [], []
    for inputs, state in starts(method, SAMPLINGS[sampling], ends):
        state = loop.run_rounds(method)(inputs, state, 2)
        kept.append(running(state))
        out.append(emitted(loop.run_rounds(method)(inputs, state, LENGTH)))
    return counted(kept), counted(out)


@functools.cache
def search_laws(rule, sampling, ends) -> tuple[dict, dict]:
    after = beam_laws.search_law(table(), rule, W, LENGTH, SAMPLINGS[sampling], ends)
    kept = lawful(after[1], lambda o: padded(o[0], 2))
    return kept, lawful(after[-1], lambda o: [(o[1][0][1], LENGTH)])


# Similar rules. The test must tell a rule's samples from the distribution of each of these.
SLIPS = {
    "raw": [
        RULES["warped"],
        Rule("raw", likeliest=True),
        Rule("raw", likeliest=False, replaced=True),
    ],
    "warped": [RULES["raw"], Rule("warped", likeliest=True), Rule("tempered", likeliest=False)],
    "transformers": [
        Rule("tempered", likeliest=False),
        Rule("tempered", likeliest=True, spare=1),
        Rule("tempered", likeliest=True, spare=3),
        Rule("warped", likeliest=True),
        Rule("raw", likeliest=True),
    ],
}


def accepts(joint, case, method=None) -> bool:
    method = method or build("beam", beams=W, joint=joint)
    pairs = zip(search_counts(method, *case), search_laws(RULES[joint], *case), strict=True)
    return all(p_value(seen, law) > laws.ALPHA for seen, law in pairs)


@pytest.mark.parametrize("joint", RULES)
def test_sampled_beams_have_the_law_of_their_draws(joint):
    assert accepts(joint, CASES[0])
    kept = search_counts(build("beam", beams=W, joint=joint), *CASES[0])[0]
    for slip in SLIPS[joint]:
        assert p_value(kept, search_laws(slip, *CASES[0])[0]) < laws.ALPHA, slip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[1:], ids=str)
@pytest.mark.parametrize("joint", RULES)
def test_sampled_beams_have_their_law_hot_and_endless(joint, case):
    assert accepts(joint, case)


def test_a_row_ends_with_its_last_live_hypothesis():
    """Top-k = 1 leaves one hypothesis. When it ends, so does the row: dead beams do not go on."""
    first = int(np.argmax(table()[()]))
    second = int(np.argmax(table()[first,]))
    assert second != first
    method = build("beam", beams=W, joint="raw")
    inputs, state = next(starts(method, sj.Sampling(1.0, top_k=1), (second,)))
    state = loop.run_rounds(method)(inputs, state, LENGTH)
    assert (np.asarray(state.stats.emitted) == 2).all()
    assert (np.asarray(state.stats.rounds) == 2).all()


@dataclasses.dataclass(frozen=True)
class Mutant(beam.BeamSearch):
    """A class of its own, so that programs compiled for the right method are not reused."""

    slip: str = ""


@pytest.mark.slow
@pytest.mark.parametrize("slip", ["unwarped", "one noise for all beams", "half the noise"])
def test_mutant_of_the_draw_is_caught(slip, monkeypatch):
    def draw(keys, log_joint, settings, whole):
        if slip == "unwarped":
            return draw_joint(keys, log_joint, settings, whole=False)
        noise = draw_joint(keys, jnp.zeros_like(log_joint), settings, whole=False)
        shared = jnp.tile(noise[:, :V], (1, W)) if "all beams" in slip else noise / 2
        return warp_joint(log_joint, settings) + shared

    monkeypatch.setattr(beam, "draw_joint", draw)
    assert not accepts("raw", CASES[0], Mutant(W, "raw", slip=slip))


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_law_of_transformers_is_the_one_enumerated(sampling, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    save_pretrained(tmp_path, *config())
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([PROMPT] * ROWS)
    torch.manual_seed(0)
    out = peer.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        num_beams=W,
        max_new_tokens=LENGTH,
        eos_token_id=END,
        pad_token_id=PAD,
        temperature=SAMPLINGS[sampling].temperature,
        top_k=SAMPLINGS[sampling].top_k,
        top_p=SAMPLINGS[sampling].top_p,
    )[:, len(PROMPT) :].numpy()
    counts = counted([np.where(out == PAD, -1, out)])
    for name, rule in RULES.items():
        p = p_value(counts, search_laws(rule, sampling, (END,))[1])
        assert (p > laws.ALPHA) == (name == "transformers"), name


def drafted_counts(joint, sampling) -> dict:
    """Counts of a draft's beams, two tokens each, in the order of their draws."""
    method = build("mtad", gamma=2, width=W, joint=joint)

    @jax.jit
    def beams(inputs, state):
        keys = probs.round_keys(state.keys, state.stats.rounds)
        draft, found = method.drafter.search(inputs, state, keys, state.drafter_state)
        each = [method.drafter.beam_as_chain(draft, found, jnp.full(ROWS, i))[0] for i in range(W)]
        return jnp.stack([jnp.where(c.valid, c.tokens, -1)[:, 1:] for c in each], axis=1)

    return counted([beams(*start) for start in starts(method, SAMPLINGS[sampling], (END,))])


@pytest.mark.parametrize("joint", ["raw", pytest.param("warped", marks=pytest.mark.slow)])
def test_beam_drafts_have_the_law_of_their_draws(joint):
    counts = drafted_counts(joint, "cold")
    for rule in RULES.values():
        law = beam_laws.drafted_law(table(), rule, W, 2, SAMPLINGS["cold"], (END,))
        p = p_value(counts, lawful(law, lambda beams: padded(beams, 2)))
        assert (p > laws.ALPHA) == (rule == RULES[joint]), rule


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("joint", ["raw", pytest.param("warped", marks=pytest.mark.slow)])
def test_mtjd_draws_blocks_from_the_joint(joint, sampling):
    """The joint of all blocks warped as a whole, or the product of warped conditionals."""
    method = build("mtjd", block=2, width=V, joint=joint)
    run = loop.run_rounds(method)
    states = starts(method, SAMPLINGS[sampling], (END,))
    counts = counted([emitted(run(inputs, state, 1)) for inputs, state in states])
    for other in ("raw", "warped"):
        law = beam_laws.block_law(table(), other, 2, SAMPLINGS[sampling], (END,))
        p = p_value(counts, lawful(law, lambda block: [(block, LENGTH)]))
        assert (p > laws.ALPHA) == (other == joint), other


# --- MTJD where not every block can be a beam -------------------------------------------------


def block_counts(sampling, block, width=1, joint="raw", rounds=1) -> dict:
    method = MTJD(block, width, joint)
    run = loop.run_rounds(method)
    states = starts(method, sampling, (END,))
    return counted([emitted(run(inputs, state, rounds)) for inputs, state in states])


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        (SAMPLINGS["cold"], {"block": 1}),
        (SAMPLINGS["hot"], {"block": 1}),
        (SAMPLINGS["hot"], {"block": 1, "joint": "warped"}),
        (sj.Sampling(1.0), {"block": 2}),
        (SAMPLINGS["hot"], {"block": 2, "width": 6}),  # top-k of a search that is wide enough
        (SAMPLINGS["cold"], {"block": 2, "joint": "warped"}),
    ],
)
def test_mtjd_is_exact_where_the_joint_can_be_drawn(sampling, options):
    counts = block_counts(sampling, **options)
    joint = options.get("joint", "raw")
    law = beam_laws.block_law(table(), joint, options["block"], sampling, (END,))
    assert p_value(counts, lawful(law, lambda block: [(block, LENGTH)])) > laws.ALPHA
    other = dataclasses.replace(sampling, temperature=0.5 * sampling.temperature)
    law = beam_laws.block_law(table(), joint, options["block"], other, (END,))
    assert p_value(counts, lawful(law, lambda block: [(block, LENGTH)])) < laws.ALPHA


def test_mtjds_last_block_of_one_token_has_the_warped_distribution():
    """Three tokens in blocks of two: the third is drawn exactly at any temperature."""
    sampling = SAMPLINGS["hot"]
    counts = block_counts(sampling, rounds=2, block=2, width=6)
    law = {}
    for block, chance in beam_laws.block_law(table(), "raw", 2, sampling, (END,)).items():
        if END in block:
            law[block] = chance
            continue
        last = np.exp(beam_laws.normalized(beam_laws.cut(table()[block], sampling)))
        law |= {(*block, token): chance * p for token, p in enumerate(last) if p > 0}
    assert p_value(counts, lawful(law, lambda block: [(block, LENGTH)])) > laws.ALPHA


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("sampling", [sj.Sampling(0.5), sj.Sampling(1.0, top_p=0.7)])
def test_mtjd_comes_near_the_joint_with_more_beams(sampling):
    """Without top-k the warped joint is approximated by draws; eight of them are not enough."""
    law = beam_laws.block_law(table(), "raw", 2, sampling, (END,))
    want = lawful(law, lambda block: [(block, LENGTH)])

    def distance(width):
        counts = block_counts(sampling, block=2, width=width)
        total = sum(counts.values())
        outcomes = counts.keys() | want.keys()
        return sum(abs(counts.get(o, 0) / total - want.get(o, 0)) for o in outcomes) / 2

    one, eight, many = map(distance, (1, 8, 96))
    assert many < 0.03 and many < eight < one


def test_mtjd_of_one_token_draws_from_a_whole_vocabulary():
    """5,000 tokens, of which the eight likeliest have little of the mass."""
    vocab, rows = 5000, 8192
    cfg = dataclasses.replace(config()[0], vocab_size=vocab)
    lm = sj.from_params(cfg, init_params(cfg, jax.random.key(1)))
    logits = lm.net.rescore(jnp.array([PROMPT]))[0, -1]
    p = np.asarray(jax.nn.softmax(logits), float)
    assert np.sort(p)[-8:].sum() < 0.05

    method = sj.method("mtjd").build(Context(lm, None), {"block": 1})[0]
    inputs = Engine(lm, None, method, {}).inputs(sj.Sampling(1.0), rows)
    state = sj.init_state(method, inputs, [list(PROMPT)] * rows, max_new_tokens=1)
    tokens = np.asarray(sj.run_rounds(method, inputs, state, 1).tokens)[:, len(PROMPT)]
    # In bins of 100 ids, so that each has enough draws for the test.
    seen = np.bincount(tokens // 100, minlength=50).astype(float)
    assert laws.p_value(seen, p.reshape(50, 100).sum(1) / p.sum()) > laws.ALPHA
    assert len(np.unique(tokens)) > 2000


def test_a_joint_has_no_cutoffs_of_single_tokens(target):
    asked = {"method": "mtjd", "max_new_tokens": 4, "sampling": sj.Sampling(1.0, min_p=0.3)}
    with pytest.raises(OptionError, match="no min_p and no other cutoff"):
        sj.generate(target, [PROMPT], **asked)
    sj.generate(target, [PROMPT], **asked, options={"joint": "warped"})


def test_a_joint_top_k_needs_as_many_beams(target):
    asked = {"method": "mtjd", "max_new_tokens": 4, "sampling": sj.Sampling(1.0, top_k=20)}
    with pytest.raises(OptionError, match="top_k=20 likeliest blocks, and width=8 beams"):
        sj.generate(target, [PROMPT], **asked)
    sj.generate(target, [PROMPT], **asked, options={"width": 20})
