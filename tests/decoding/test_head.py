"""A draft head: its logits, its state between rounds, its distribution, and every refusal.

The target has three layers and twelve ids, and the head drafts seven of them. It agrees with the
target often enough that rounds accept some tokens, but not all.
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.core import loop
from specjax.core.types import DETERMINISTIC, NO_NODE, NO_PARENT, Draft, TreeShape, Verdict
from specjax.draft.head import HeadBest, HeadChain, HeadDrafter, HeadState, HeadTree
from specjax.lm import attach
from specjax.models import ModelConfig, init_params, load_pretrained, save_pretrained
from specjax.models.families.head_config import HeadConfig, usual_layers
from specjax.models.families.head_layouts import D2T, T2D
from specjax.models.forward_pass import hidden_states
from specjax.models.head import draft_logits, fed_back, fused_states, head_states
from specjax.models.hf.layout import WEIGHTS
from specjax.models.hf.write import to_tensors
from specjax.registry import Context, compose
from specjax.runtime.engine import Engine, Request
from specjax.runtime.prefill import Prefill
from support import head_reference, laws
from support.checkpoints import edit_config, edit_weights, same
from support.heads import fitted_head, random_params, to_midlayer
from support.variant_models import logits_jit, pair

VOCAB, IDS = 12, np.array([0, 1, 3, 4, 7, 8, 11])
VARIANTS = {
    "plain": {},
    "before": {"norm_before_fc": True, "norm_before_residual": True},
    "each": {"fc_norm": True, "norm_output": True},
}
TOLERANCE = 1e-4


def tiny(vocab: int = VOCAB, layers: int = 3, seed: int = 0) -> sj.LM:
    cfg = ModelConfig.llama(
        vocab_size=vocab,
        hidden_size=16,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=24,
        max_position=256,
    )
    params = init_params(cfg, jax.random.key(seed))
    params["layers"] = jax.tree.map(lambda x: 6 * x, params["layers"])
    return sj.from_params(cfg, params | {"embed": 30 * params["embed"]})


@functools.cache
def target() -> sj.LM:
    return tiny()


@functools.cache
def made(variant: str = "plain", own: bool = True) -> tuple[HeadConfig, dict]:
    """A head's config and params, norms included at random."""
    options = VARIANTS[variant] | {"layer_ids": (0, 1, 2), "own_embedding": own}
    cfg = HeadConfig.of(target().config, IDS, **options)
    return cfg, random_params(cfg)


@functools.cache
def head(variant: str = "plain") -> sj.LM:
    return attach(sj.from_params(*made(variant)), target())


@functools.cache
def agreeing() -> sj.LM:
    """A head whose drafts are accepted two times in five."""
    return fitted_head(target(), np.delete(np.arange(VOCAB), [2, 5, 6]), (0, 1, 2))


def sequence(length: int, seed: int = 3) -> np.ndarray:
    return np.random.Generator(np.random.Philox(seed)).integers(0, VOCAB, length).astype(np.int32)


def states_of(tokens: np.ndarray) -> jax.Array:
    """The target's auxiliary states for the head, ``[1, T, P, D]``, from P layers."""
    at, lm = np.arange(len(tokens))[None], target()
    ones = np.ones_like(at)
    return hidden_states(lm.config, lm.params, tokens[None], at, ones, aux_layers=(0, 1, 2)).aux


# --- numbers -----------------------------------------------------------------------------------


def test_auxiliary_states_are_the_inputs_of_layers():
    """A model cut to its first n layers, without the last norm, outputs the input of layer n."""
    lm, tokens = target(), sequence(9)[None]
    at, ones = np.arange(9)[None], np.ones((1, 9), np.int32)
    _, states = hidden_states(lm.config, lm.params, tokens, at, ones, aux_layers=(2, 1))
    scanned = hidden_states(
        lm.config, lm.params, tokens, at, ones, aux_layers=(2, 1), scan=True
    ).aux
    for place, layers in enumerate((2, 1)):
        cfg = dataclasses.replace(lm.config, num_layers=layers, final_norm=False)
        kept = {str(i): lm.params["layers"][str(i)] for i in range(layers)}
        params = {"embed": lm.params["embed"], "layers": kept}
        want, _ = hidden_states(cfg, params, tokens, at, ones)
        np.testing.assert_allclose(states[:, :, place], want, atol=1e-5)
    np.testing.assert_allclose(scanned, states, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_reference(variant):
    """The logits after a whole sequence, and after one drafted token more."""
    cfg, params = made(variant)
    tokens, states = sequence(8), states_of(sequence(8))
    want = head_reference.drafted_logits(cfg, to_tensors(cfg, params), tokens, states[0], [4])
    f = fused_states(cfg, params, states[:, :-1])
    at, ones = np.arange(8)[None], np.ones((1, 8), np.int32)
    hidden = head_states(cfg, params, tokens[None, 1:], f, at[:, 1:], ones[:, 1:])
    np.testing.assert_allclose(draft_logits(cfg, params, hidden)[0, -1], want[0], atol=TOLERANCE)
    f = jnp.append(f, fed_back(cfg, params, hidden[:, -1:]), axis=1)
    read = np.append(tokens[1:], 4).astype(np.int32)[None]
    hidden = head_states(cfg, params, read, f, at, ones)
    np.testing.assert_allclose(draft_logits(cfg, params, hidden)[0, -1], want[1], atol=TOLERANCE)


@pytest.mark.torch
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_a_layer_of_transformers(variant):
    """Against transformers' Llama layer, with an attention input of twice the hidden size."""
    torch = pytest.importorskip("torch")
    from support import head_torch

    cfg, params = made(variant)
    tokens, states = sequence(8), states_of(sequence(8))
    f = fused_states(cfg, params, states[:, :-1])
    at, ones = np.arange(7)[None], np.ones((1, 7), np.int32)
    hidden = head_states(cfg, params, tokens[None, 1:], f, at, ones)
    with torch.inference_mode():
        theirs = head_torch.Head(cfg, to_tensors(cfg, params))(tokens[1:], states[0, :-1])
    np.testing.assert_allclose(draft_logits(cfg, params, hidden)[0], theirs, atol=TOLERANCE)


@pytest.fixture(scope="module")
def proposed():
    """A draft of each form after prompts of different lengths, and the head that drafted it."""
    lm, draft = target(), head("each")
    prompts = [sequence(21), sequence(2, 4), sequence(1, 5)]
    found = {}
    for name, drafter in {
        "chain": HeadChain(gamma=3),
        "tree": HeadTree((2, 2)),
        "best": HeadBest(budget=6, depth=3, width=2),
    }.items():
        method = sj.draft_verify(drafter, sj.Warped(), sj.verify.match)
        engine = Engine(lm, draft, method, {})
        inputs = engine.inputs(sj.Sampling(0.9), len(prompts))
        keys = jax.random.split(jax.random.key(0), len(prompts))
        budget = np.full(len(prompts), 40, np.int32)
        state = loop.start(method, inputs, prompts, budget, keys, chunk=16)
        found[name] = jax.jit(drafter.propose)(inputs, state, state.keys).draft
    return prompts, draft, found


def law_of(prompt: np.ndarray, path: tuple[int, ...]) -> np.ndarray:
    """log q after the prompt and a path of drafted tokens, by the reference."""
    cfg, params = made("each")
    states, tensors = states_of(prompt)[0], to_tensors(cfg, params)
    logits = head_reference.drafted_logits(cfg, tensors, prompt, states, path)[-1] / 0.9
    law = np.full(VOCAB, -np.inf)
    law[IDS] = logits - np.logaddexp.reduce(logits)
    return law


@pytest.mark.parametrize("form", ["chain", "tree", "best"])
def test_drafted_laws_equal_the_reference(proposed, form):
    """Each node's q belongs to its own path, over the target's ids; ids not drafted have 0."""
    prompts, _, drafts = proposed
    draft = drafts[form]
    for row, prompt in enumerate(prompts):
        if len(prompt) == 1:  # no hidden states yet, so nothing is drafted
            assert not draft.valid[row, 1:].any()
            continue
        for node in range(1, draft.shape.nodes):
            law = law_of(prompt, path_to(draft, row, int(draft.parents[row, node])))
            if draft.log_q is None:
                token = int(draft.tokens[row, node])
                np.testing.assert_allclose(draft.token_log_q[row, node], law[token], atol=TOLERANCE)
            else:
                q = draft.log_q[row, draft.q_row[node]]
                np.testing.assert_allclose(q, law, atol=TOLERANCE)


def path_to(draft: Draft, row: int, node: int) -> tuple[int, ...]:
    """Tokens from below the root down to a node."""
    path = ()
    while node:
        path, node = (int(draft.tokens[row, node]), *path), int(draft.parents[row, node])
    return path


def best_first(law_after, budget: int, depth: int, width: int) -> set[tuple[int, ...]]:
    """The likeliest paths of the tree that expands the best nodes of every level."""
    found, frontier = [], [(0.0, ())]
    for _ in range(depth):
        level = []
        for score, path in frontier:
            law = law_after(path)
            level += [(score + law[x], (*path, int(x))) for x in np.argsort(-law)[:width]]
        found, frontier = found + level, sorted(level, reverse=True)[:width]
    return {path for _, path in sorted(found, reverse=True)[:budget]}


def test_best_first_candidates_are_the_likeliest(proposed):
    prompts, _, drafts = proposed
    draft = drafts["best"]
    assert draft.valid[:2].all()
    assert (np.asarray(draft.parents)[:, 1:] < np.arange(1, draft.shape.nodes)).all()
    for row in range(2):
        law_after = functools.partial(law_of, prompts[row])
        paths = {path_to(draft, row, node) for node in range(1, draft.shape.nodes)}
        assert paths == best_first(law_after, budget=6, depth=3, width=2)


def test_safeailabs_options_give_the_tree_traced_by_hand(target):
    """total_tokens 6, depth 1 and top_k 2: five nodes below the root, on two levels.

    The first level keeps tokens 0 (0.6) and 1 (0.3). Their children have 0.30, 0.24 and 0.27,
    0.018; the best five of the six nodes leave out the last.
    """
    after = {(): [0.6, 0.3, 0.1], (0,): [0.5, 0.4, 0.1], (1,): [0.9, 0.06, 0.04]}

    def log_rows(*paths):
        rows = np.full((1, len(paths), 98), -np.inf, np.float32)
        for i, path in enumerate(paths):
            rows[0, i, :3] = np.log(after[path])
        return jnp.asarray(rows)

    class ByHand(HeadBest):
        def can_draft(self, state):
            return jnp.ones(1, bool)

        def first_logits(self, inputs, state):
            return log_rows(())[:, 0], None

        def level_logits(self, inputs, state, carry, tokens, ancestors, parent_index):
            assert tokens.tolist() == [[0, 1]]
            return log_rows((0,), (1,)), carry

        def to_target_ids(self, inputs, ids):
            return ids

    total_tokens, depth, top_k = 6, 1, 2
    drafter = ByHand(budget=total_tokens - 1, depth=depth + 1, width=top_k)
    inputs = sj.Inputs.of(target, None, sj.Sampling(1.0), batch=1)
    state = SimpleNamespace(length=jnp.array([1]), tokens=jnp.array([[7]]))
    draft = drafter.propose(inputs, state, None).draft
    paths = {path_to(draft, 0, node) for node in range(1, draft.shape.nodes)}
    assert paths == {(0,), (1,), (0, 0), (1, 0), (0, 1)}


# --- between rounds -----------------------------------------------------------------------------


class AfterVerdict:
    """A verdict over a small tree, and the head's state after it."""

    def __init__(self):
        lm, draft = target(), head("each")
        self.prompt, self.below = sequence(9), (3, 5, 6)
        # Nodes: the root; a and c below it; b below a. a is accepted, and 8 is the next token.
        a, b, c = self.below
        paths = ([], [a], [a, b], [c])
        states = [states_of(np.append(self.prompt, path).astype(np.int32))[:, -1] for path in paths]
        chain = TreeShape(4, 2, 2)
        self.draft = Draft(
            tokens=jnp.array([[self.prompt[-1], a, b, c]]),
            parents=jnp.array([[NO_PARENT, 0, 1, 0]]),
            valid=jnp.ones((1, 4), bool),
            aux_states=jnp.stack(states, axis=1),
            shape=chain,
            sampling=DETERMINISTIC,
        )
        self.verdict = Verdict(
            path=jnp.array([[0, 1, NO_NODE]]),
            num_accepted=jnp.array([1]),
            num_tested=jnp.array([2]),
            tokens=jnp.array([[a, 8, 0]]),
            num_tokens=jnp.array([2]),
        )
        self.engine = Engine(lm, draft, None, {})
        self.after = np.append(self.prompt, [a, 8]).astype(np.int32)

    def state(self, tokens):
        class State:
            length = jnp.array([len(tokens)])
            capacity = 32

        State.tokens = jnp.zeros((1, 32), jnp.int32).at[0, : len(tokens)].set(tokens)
        State.done = jnp.zeros((1,), bool)
        return State

    def fresh(self, drafter, tokens) -> HeadState:
        """The head's state after a prefill of the tokens."""
        inputs, state = self.engine.inputs(sj.Sampling(), 1), self.state(tokens)
        state.drafter_state = drafter.init(inputs, state)
        prefilled, begin = state.tokens[:, : len(tokens) - 1], jnp.zeros((1,), jnp.int32)
        return drafter.prefill_chunk(inputs, state, prefilled, begin, states_of(tokens)[:, :-1])

    def gap(self, drafter) -> float:
        """The largest difference between the state after the verdict and a fresh prefill."""
        tree = HeadBest(budget=3, depth=2, width=2)
        inputs, state = self.engine.inputs(sj.Sampling(), 1), self.state(self.prompt)
        carried = self.fresh(tree, self.prompt)
        # Overwrite the positions after the committed ones, as drafting does.
        dirty = jax.tree.map(lambda x: x.at[:, :, len(self.prompt) - 1 :].set(9), carried.cache)
        carried = carried._replace(cache=dirty)
        got = drafter.update(inputs, state, carried, self.draft, self.verdict, None)
        want = self.fresh(tree, self.after)
        committed = len(self.after) - 1
        pairs = [(got.hidden, want.hidden)]
        pairs += [
            (x[:, :, :committed], y[:, :, :committed])
            for x, y in zip(jax.tree.leaves(got.cache), jax.tree.leaves(want.cache), strict=True)
        ]
        return max(float(jnp.abs(x - y).max()) for x, y in pairs)


@dataclasses.dataclass(frozen=True)
class Mutant(HeadBest):
    """An update with one thing wrong."""

    fault: str = ""

    def update(self, inputs, state, carried, draft, verdict, probe_logits):
        if self.fault == "states of a rejected node":
            draft = draft.replace(aux_states=draft.aux_states[:, jnp.array([0, 3, 2, 1])])
        if self.fault == "state and token one apart":
            draft = draft.replace(aux_states=jnp.roll(draft.aux_states, 1, axis=1))
        if self.fault == "the last hidden state of all":
            verdict = dataclasses.replace(verdict, num_tokens=jnp.array([3]))
        after = super().update(inputs, state, carried, draft, verdict, probe_logits)
        stale = self.fault == "a stale cache after a rejection"
        return after._replace(cache=carried.cache) if stale else after


def test_after_a_verdict_the_head_has_read_what_stands():
    assert AfterVerdict().gap(HeadBest(budget=3, depth=2, width=2)) < 1e-4


@pytest.mark.parametrize(
    "fault",
    [
        "states of a rejected node",
        "state and token one apart",
        "the last hidden state of all",
        "a stale cache after a rejection",
    ],
)
def test_a_slip_between_rounds_is_caught(fault):
    assert AfterVerdict().gap(Mutant(3, 2, 2, fault)) > 1e-2


# --- rows in the scheduler ----------------------------------------------------------------------

FORMS = {
    "chain": {"rule": "speculative", "options": {"width": 3}},
    "drawn": {
        "rule": "specinfer",
        "options": {"tree": "drawn", "branching": (2, 2), "width": 3},
    },
    "dynamic": {"rule": "match", "options": {"width": 3}},
}


def run(prompts, form: str, **arguments) -> sj.Generation:
    arguments |= FORMS[form]
    return sj.generate(target(), prompts, draft=agreeing(), drafter="head", **arguments)


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("form", ["chain", slow("drawn"), slow("dynamic")])
def test_a_row_that_takes_a_batch_slot_is_the_row_alone(form):
    """Tokens and counters are equal, with several samples and prompts that share a prefix."""
    a = sequence(17)
    job = [a, [4], np.append(a[:16], [9, 9]), np.append(a, 2), [1, 2]]
    arguments = {"max_new_tokens": [14, 21, 9, 17, 1], "num_samples": 2}
    for sampling in (sj.Sampling(), sj.Sampling(0.9)):
        together = run(job, form, sampling=sampling, batch_size=3, prefixes=2, **arguments)
        alone = run(job, form, sampling=sampling, batch_size=1, prefixes=0, **arguments)
        for one, other in zip(together.tokens, alone.tokens, strict=True):
            np.testing.assert_array_equal(one, other)
        for name, counts in together.stats.items():
            np.testing.assert_array_equal(counts, alone.stats[name], err_msg=name)
        assert together.passes < alone.passes and sum(map(bool, together.cached_tokens)) >= 4
        assert 0.2 < together.stats["accepted"].sum() / together.stats["tested"].sum() < 0.8


def gap_after_another(prompt: np.ndarray, parts: int) -> float:
    """The largest difference from a fresh state if the first ``parts`` tokens were cached."""
    drafter = HeadChain(gamma=2)
    engine = Engine(target(), head(), sj.draft_verify(drafter, sj.Warped(), sj.verify.match), {})
    other = np.append(prompt[:parts], (prompt[parts:] + 1) % VOCAB).astype(np.int32)
    states = []
    for rows in ([other, prompt], [prompt]):
        prefill = Prefill(engine, sj.Sampling(), 128, False, prefixes=1)
        for tokens in rows:
            prefill.begin([Request(tokens, 4, jax.random.key(0))])
            while not prefill.done:
                prefill.run_chunk()
        states.append(prefill.state)
        assert prefill.cached == (parts if len(rows) > 1 else 0)
    (got, want), prefilled = states, len(prompt) - 1
    leaves = [jax.tree.leaves((x.cache, x.drafter_state.cache)) for x in states]
    pairs = [(x[:, :, :prefilled], y[:, :, :prefilled]) for x, y in zip(*leaves, strict=True)]
    pairs += [(got.drafter_state.hidden, want.drafter_state.hidden)]
    return max(float(jnp.abs(x - y).max()) for x, y in pairs)


@pytest.mark.parametrize("parts", [16, 17, 33, 38])
def test_a_prompt_that_parts_from_another_is_read_as_alone(parts, monkeypatch):
    """The head reads the last common token again, because it pairs a token with the next one.

    With 38 of 39 tokens cached, it reads only that one. Without ``lookback`` the stale pair stays.
    """
    assert gap_after_another(sequence(39), parts) < 1e-4
    monkeypatch.setattr(sj.DraftVerify, "lookback", 0)
    assert gap_after_another(sequence(39), parts) > 1e-2


# --- distribution --------------------------------------------------------------------------------

PROMPT, LENGTH, SAMPLING = (1, 3, 0), 3, sj.Sampling(temperature=0.9, top_k=3)


@functools.cache
def small_pair() -> tuple[sj.LM, sj.LM]:
    """Four ids, of which the head drafts three."""
    lm = tiny(vocab=4, layers=2)
    cfg = HeadConfig.of(lm.config, np.array([0, 1, 3]), layer_ids=(0, 1), own_embedding=False)
    params = jax.tree.map(lambda x: 10 * x, init_params(cfg, jax.random.key(2)))
    params |= {"norm": {"weight": params["norm"]["weight"] / 10}}
    return lm, attach(sj.from_params(cfg, params), lm)


def p_value(drafter, rule) -> float:
    lm, draft = small_pair()
    engine = Engine(lm, draft, sj.draft_verify(drafter, sj.Warped(), rule), {})
    grid, logits = laws.continuation_logits(lm, PROMPT, LENGTH)
    law = laws.continuation_law(lm, grid, logits, SAMPLING)
    assert np.sum(law > 1e-3) > 10, "the tiny model must leave room for errors to show"
    return laws.p_value(laws.continuation_counts(engine, PROMPT, LENGTH, SAMPLING), law)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        (HeadChain(gamma=2), "speculative"),
        (HeadChain(gamma=2), "block"),
        (HeadTree((2, 2)), "specinfer"),
        (HeadTree((2, 2), replacement=True), "specinfer"),
        (HeadBest(budget=4, depth=2, width=2), "match"),
        (HeadBest(budget=4, depth=2, width=2), "specinfer"),
        (HeadBest(budget=2, depth=2, width=2), "match"),  # as many nodes as a chain
    ],
    ids=str,
)
def test_law(drafter, rule):
    assert p_value(drafter, getattr(sj.verify, rule)) > laws.ALPHA


@dataclasses.dataclass(frozen=True)
class OverTheWrongVocabulary(HeadChain):
    """A mutant: maps the head's ids to the target's first ids."""

    def to_target_vocab(self, inputs, rows):
        missing = inputs.draft.config.vocab_size - rows.shape[-1]
        pad = [(0, 0)] * (rows.ndim - 1) + [(0, missing)]
        return jnp.pad(rows, pad, constant_values=-jnp.inf)


@pytest.mark.slow
def test_q_over_the_wrong_vocabulary_is_caught():
    assert p_value(OverTheWrongVocabulary(gamma=2), sj.verify.speculative) < laws.ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("form", ["chain", "dynamic"])
def test_greedy_output_is_plain_decoding_s(form):
    prompts = [sequence(1 + n % 19, n) for n in range(200)]
    want = sj.generate(target(), prompts, max_new_tokens=12).tokens
    for rows, chosen in ((8, slice(None)), (1, slice(40))):
        got = run(prompts[chosen], form, max_new_tokens=12, batch_size=rows)
        assert got.stats["accepted"].sum() > 0.3 * got.stats["rounds"].sum()
        for a, b in zip(got.tokens, want, strict=False):
            np.testing.assert_array_equal(a, b)


def test_a_tree_of_as_many_nodes_as_a_chain_is_no_chain():
    """Its nodes may be siblings: depth is the most that a path may have."""
    options = {"budget": 3, "depth": 3, "width": 2}
    assert not HeadBest(**options).shape.is_chain
    prompts = [sequence(1 + n % 19, n) for n in range(24)]
    want = sj.generate(target(), prompts, max_new_tokens=12).tokens
    parts = {"drafter": "head", "rule": "match", "options": options}
    got = sj.generate(target(), prompts, draft=agreeing(), max_new_tokens=12, **parts)
    assert got.stats["accepted"].sum() > 0
    for a, b in zip(got.tokens, want, strict=True):
        np.testing.assert_array_equal(a, b)


KINDS = ("tinyllama", "qwen3", "pythia", "opt-350m", "bloom", "gemma3")  # one of each family


@pytest.mark.parametrize("name", ["gpt2", *map(slow, KINDS)])
def test_every_family_is_a_target(name):
    """Greedy tokens equal the argmax of passes over whole sequences, without a cache."""
    lm, prompts = pair(name)[0], np.array([[5, 6, 7, 8], [9, 3, 9, 4]], np.int32)
    draft = fitted_head(lm, np.arange(lm.vocab_limit - 3), (0, 1))
    arguments = {"drafter": "head", "rule": "match", "options": {"width": 3, "budget": 6}}
    out = sj.generate(lm, list(prompts), draft=draft, max_new_tokens=10, **arguments)
    assert out.stats["accepted"].sum() > 0
    texts = np.append(prompts, np.stack(out.tokens), axis=1)
    at, ones = np.broadcast_to(np.arange(14), texts.shape), np.ones_like(texts)
    logits = logits_jit(lm.config, lm.params, texts, at, ones, "dense")[:, 3:-1, : lm.vocab_limit]
    np.testing.assert_array_equal(logits.argmax(-1), out.tokens)


# --- directories and refusals -------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    cfg, params = made("each")
    save_pretrained(tmp_path / "head", cfg, params)
    return tmp_path / "head"


@pytest.mark.parametrize("layout", ["speculators", "SafeAILab"])
def test_saved_heads_load_bit_for_bit(saved, layout):
    if layout == "SafeAILab":
        to_midlayer(saved)
    cfg, params = load_pretrained(saved)
    assert cfg == made("each")[0] and same(params, made("each")[1])
    assert sj.load(saved).is_head


def test_pickled_heads_load_where_asked_for(saved):
    torch = pytest.importorskip("torch")
    to_midlayer(saved)
    tensors = to_tensors(*made("each"))
    named = {n.replace("layers.0.", "midlayer."): torch.tensor(x) for n, x in tensors.items()}
    torch.save(named, saved / "pytorch_model.bin")
    (saved / WEIGHTS).unlink()
    assert same(load_pretrained(saved, pickles=True)[1], made("each")[1])


def without(name):
    return lambda tensors: tensors.pop(name)


def put(name, value):
    return lambda tensors: tensors.__setitem__(name, value)


BROKEN = {
    "missing fc": (without("fc.weight"), "fc.weight is missing"),
    "missing d2t": (without(D2T), "d2t is missing"),
    "d2t past the vocabulary": (put(D2T, np.full(7, 6)), "names id 12, and the target has ids"),
    "d2t below 0": (put(D2T, np.full(7, -1)), "names id -1"),
    "d2t twice": (put(D2T, np.array([0, 0, 1, 0, 3, 3, 5])), "each once"),
    "d2t too short": (put(D2T, np.zeros(6, np.int64)), "expected 7 whole numbers"),
    "t2d of others": (put(T2D, np.ones(12, bool)), "name different ids"),
    "misshapen fc": (put("fc.weight", np.ones((16, 32), np.float32)), "fc.weight has shape"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tensors_are_refused_in_one_line(saved, name):
    edit, says = BROKEN[name]
    edit_weights(saved, edit)
    with pytest.raises(sj.SpecjaxError, match=says) as caught:
        sj.load(saved)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("names", [(T2D,), (D2T, T2D)])
def test_a_head_of_all_ids_loads_with_leftover_tensors(tmp_path, names):
    """SafeAILab's code leaves zeros in both tensors of a head that drafts the whole vocabulary."""
    cfg = HeadConfig.of(target().config, None, layer_ids=(0, 1, 2))
    params = random_params(cfg)
    save_pretrained(tmp_path / "head", cfg, params)
    leftover = np.zeros(cfg.vocab_size, np.int64)
    edit_weights(tmp_path / "head", lambda tensors: tensors.update(dict.fromkeys(names, leftover)))
    loaded, again = load_pretrained(tmp_path / "head")
    assert loaded == cfg and loaded.ids is None and same(again, params)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"speculators_model_type": "dflash"}, "'dflash' is not supported"),
        ({"norm_before_fc": True}, "exclude each other"),
        ({"draft_vocab_size": 13}, "draft_vocab_size=13 is more"),
        ({"eagle_aux_hidden_state_layer_ids": [0, -1]}, "expected a list"),
        ({"fc_norm": "yes"}, "expected true or false"),
    ],
)
def test_configs_are_refused_in_one_line(saved, change, says):
    edit_config(saved, **change)
    with pytest.raises(sj.SpecjaxError, match=says):
        sj.load(saved)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"target_size": 32}, "hidden states of size 32, target params has 16"),
        ({"vocab_size": 99, "draft_ids": None}, "a vocabulary of 99, target params has 12"),
        ({"layer_ids": (0, 1, 3)}, "reads layer 3, target params has layers 0 to 2"),
        ({"hidden_size": 8, "own_embedding": False}, "no embedding, and the target's is 16 wide"),
    ],
)
def test_a_head_for_another_target_is_refused(change, says):
    other = dataclasses.replace(head(), config=dataclasses.replace(head().config, **change))
    with pytest.raises(sj.SpecjaxError, match=says):
        sj.generate(target(), [[1, 2]], draft=other, method="speculative")


def test_the_usual_layers_are_an_early_one_the_middle_and_a_late_one():
    sizes = {layers: dataclasses.replace(target().config, num_layers=layers) for layers in (2, 32)}
    assert usual_layers(sizes[32]) == (2, 16, 29)
    with pytest.raises(sj.ModelError, match="2 layers has no layers 2, n // 2 and n - 3"):
        usual_layers(sizes[2])


@pytest.mark.parametrize(
    ("lm", "draft", "asked", "says"),
    [
        (head, target, {}, "can only draft"),
        (target, target, {"drafter": "head"}, "is a whole model"),
        (target, head, {"method": "mtad"}, "take a method of chains or trees"),
        (target, head, {"method": "tree-scd"}, "needs a model as amateur"),
        (
            target,
            head,
            {"drafter": "head", "options": {"width": 8}},
            "more than the vocabulary's 7",
        ),
    ],
)
def test_a_head_where_none_fits_is_refused(lm, draft, asked, says):
    with pytest.raises(sj.SpecjaxError, match=says) as caught:
        sj.generate(lm(), [[1, 2]], draft=draft(), **asked)
    assert len(str(caught.value).splitlines()) == 1


def test_the_rule_decides_the_form():
    context = Context(target(), head())
    forms = {
        "speculative": HeadChain,
        "match": HeadBest,
        "specinfer": HeadBest,
        "mentored": HeadChain,
    }
    for rule, form in forms.items():
        options = {"width": 3}
        assert type(compose("head", rule).build(context, options)[0].drafter) is form
    drawn = compose("head", "match").build(context, {"tree": "drawn", "width": 3})[0]
    assert type(drawn.drafter) is HeadTree and isinstance(drawn.drafter, HeadDrafter)
