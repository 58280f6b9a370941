"""SDSAT decoding: both methods against a reference without a cache, trees, options, counters.

What every method must keep (cache, rows, budgets, ends, growth) is tested in test_decode.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax._util.errors import OptionError, PairError
from specjax.draft.adaptive import Candidates, probe_groups
from specjax.models import ModelConfig, hidden_states, init_params, logits_of
from specjax.registry import Context
from specjax.runtime.engine import Engine
from support import laws

SLOW = pytest.mark.slow
V, ADAPTIVE = 5, 5
PROMPTS = [[1, 2, 3], [4], [0, 3, 3, 1, 2, 0, 4], [2, 2]]


def make(vocab=V, adaptive=(ADAPTIVE,) * 3, seed=0):
    """A model of five tokens, so that random adaptive answers are often accepted."""
    cfg = ModelConfig.llama(
        vocab_size=vocab + len(set(adaptive)),
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        intermediate_size=24,
        max_position=256,
    )
    cfg = dataclasses.replace(cfg, adaptive_ids=adaptive)
    params = init_params(cfg, jax.random.key(seed))
    params["layers"] = jax.tree.map(lambda x: 7 * x, params["layers"])
    params["embed"] = params["embed"] * 25
    return sj.from_params(cfg, params)


@pytest.fixture(scope="module")
def lm():
    return make()


def argmaxes(lm, tokens):
    """The argmax after every token of a row, without adaptive ids and without a cache."""
    row = np.zeros((1, 128), np.int32)
    row[0, : len(tokens)] = tokens
    at = np.arange(128)[None]
    segments = (at < len(tokens)).astype(np.int32)
    logits = _logits(lm, row, at, segments)
    return np.argmax(logits[0, : len(tokens), : lm.vocab_limit], axis=-1)


def _logits(lm, row, at, segments):
    run = jax.jit(hidden_states, static_argnums=0)
    hidden = run(lm.config, lm.params, row, at, segments).hidden
    return np.asarray(logits_of(lm.config, lm.params, hidden))


def two_step(lm, prompt, k, budget):
    """The two passes (Liu et al. 2024, §2.1.1) in plain Python: (tokens, accepted per round)."""
    text, accepted = list(prompt), []
    while len(text) < len(prompt) + budget:
        answers = argmaxes(lm, text + [ADAPTIVE] * k)[len(text) - 1 :]
        text.append(int(answers[0]))
        if len(text) == len(prompt) + budget:  # m₀ ends the row: no second pass
            accepted.append(0)
            break
        draft = [int(token) for token in answers[1:]]
        checked = argmaxes(lm, text + draft)[len(text) - 1 :]
        n = 0
        while n < k and draft[n] == checked[n]:
            n += 1
        accepted.append(n)
        text += [int(token) for token in checked[: n + 1]]
    return text[len(prompt) :][:budget], accepted


def single_pass(lm, prompt, k, budget):
    """The single-pass method in plain Python: group j predicts what follows j accepted tokens."""
    text, draft, accepted = list(prompt), [], []
    while len(text) < len(prompt) + budget:
        checked = argmaxes(lm, text + draft)[len(text) - 1 :]
        n = 0
        while n < len(draft) and draft[n] == checked[n]:
            n += 1
        accepted_text = text + draft[:n]
        answers = argmaxes(lm, accepted_text + [ADAPTIVE] * k)[len(accepted_text) :]
        accepted.append(n)
        text = [*accepted_text, int(checked[n])]
        draft = [int(token) for token in answers]
    return text[len(prompt) :][:budget], accepted


@pytest.mark.parametrize("k", [pytest.param(1, marks=SLOW), 3, pytest.param(5, marks=SLOW)])
@pytest.mark.parametrize(
    ("method", "reference"), [("sdsat", two_step), ("sdsat-single", single_pass)]
)
def test_greedy_run_is_the_references(lm, method, reference, k):
    """Tokens and counters of whole runs are equal, also with k above the trained window of 3."""
    plain = sj.generate(lm, PROMPTS, max_new_tokens=40)
    out = sj.generate(lm, PROMPTS, method=method, max_new_tokens=40, options={"k": k})
    total = 0
    for i, prompt in enumerate(PROMPTS):
        tokens, accepted = reference(lm, prompt, k, 40)
        np.testing.assert_array_equal(out.tokens[i], plain.tokens[i])
        assert out.tokens[i].tolist() == tokens
        assert out.stats["rounds"][i] == len(accepted)
        assert out.stats["accepted"][i] == sum(accepted)
        passes = 2 if method == "sdsat" else 1
        ended_early = passes * len(accepted) - out.stats["target_calls"][i]
        assert ended_early in (0, passes - 1)
        hist = np.bincount(accepted, minlength=k + 1)
        hist[0] -= ended_early
        np.testing.assert_array_equal(out.stats["accepted_hist"][i], hist)
        total += sum(accepted)
    assert total > 0, "some draft must stand for this to test anything"


@pytest.mark.parametrize("groups", [1, 2])
def test_fewer_groups_change_no_token(lm, groups):
    every = sj.generate(lm, PROMPTS, method="sdsat-single", max_new_tokens=40)
    few = sj.generate(
        lm, PROMPTS, method="sdsat-single", max_new_tokens=40, options={"groups": groups}
    )
    for a, b in zip(every.tokens, few.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    assert few.stats["rounds"].sum() > every.stats["rounds"].sum()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_every_probe_follows_the_one_before(groups):
    """The first probe of group j has parent j, each other one the probe before it.

    Probes are numbered after the k + 1 nodes.
    """
    k = 3
    parents = probe_groups((7,) * k, groups, rows=2, nodes=k + 1).parents
    want = [p for j in range(groups) for p in (j, k + 1 + k * j, k + 2 + k * j)]
    np.testing.assert_array_equal(parents, [want, want])


# The trees of github.com/ainergy-ml/SDSAT, decoders/model/utils.py, level by level. A node is the
# candidates' ranks on the path from the root, the deepest last, without leading zeros: 10 on the
# third level is [0, 1, 0].
PUBLISHED = {
    5: "0 1 2 3 / 0 1 2 10 11 20 21 30 / 0 1 2 10 11 20 21 100 / 0 1 2 10 11 / 0 1 2",
    7: "0 1 2 3 / 0 1 2 10 11 20 21 30 / 0 1 2 10 11 20 21 100 / 0 1 2 10 11 20 / 0 1 2 10 11 "
    "/ 0 1 2 / 0 1",
    9: "0 1 2 3 / 0 1 2 10 11 20 21 30 / 0 1 2 10 11 20 21 100 / 0 1 2 10 11 20 "
    "/ 0 1 2 10 11 20 / 0 1 2 10 11 / 0 1 2 10 / 0 1 2 / 0 1",
    11: "0 1 2 3 / 0 1 2 10 11 20 21 30 / 0 1 2 10 11 20 21 100 / 0 1 2 10 11 20 21 100 "
    "/ 0 1 2 10 11 20 / 0 1 2 10 11 20 / 0 1 2 10 11 20 / 0 1 2 10 11 / 0 1 2 10 / 0 1 2 / 0 1",
    13: "0 1 2 3 / 0 1 2 10 11 20 21 30 / 0 1 2 10 11 20 21 100 / 0 1 2 10 11 20 21 100 "
    "/ 0 1 2 10 11 20 21 100 / 0 1 2 10 11 20 21 100 / 0 1 2 10 11 20 / 0 1 2 10 11 20 "
    "/ 0 1 2 10 11 20 / 0 1 2 10 11 / 0 1 2 10 / 0 1 2 / 0 1",
}
NODES = {5: 28, 7: 36, 9: 46, 11: 60, 13: 76}


def offered(lm, k):
    """The path of ranks to every node of a drafted tree. Here token t has rank t."""
    inputs = Engine(lm, None, None, {}).inputs(sj.Sampling(temperature=1.0), 1)
    logits = jnp.broadcast_to(-jnp.arange(float(V)), (1, k, V))
    candidates = Candidates(k, "tree")
    root = jnp.zeros(1, jnp.int32)
    draft = candidates.draft(inputs, None, None, root, logits, jnp.ones(1, bool))
    assert draft.valid.all() and draft.shape == (len(candidates.parents), k, 4)
    paths = [""]
    for token, parent in zip(draft.tokens[0, 1:].tolist(), candidates.parents[1:], strict=True):
        paths.append(paths[parent] + str(token))
    return paths[1:]


@pytest.mark.parametrize("k", [3, 5, 6, 7, 9, 11, 13])
def test_tree_is_the_published_one(lm, k):
    """Another k has the first levels of the next larger tree."""
    levels = PUBLISHED[min(at for at in PUBLISHED if at >= k)].split(" / ")
    want = [path.zfill(depth) for depth, row in enumerate(levels, 1) for path in row.split()]
    assert k not in NODES or len(want) == NODES[k]
    assert offered(lm, k) == [path for path in want if len(path) <= k]


@pytest.mark.parametrize("options", [{}, {"form": "tree"}], ids=["chain", "tree"])
def test_greedy_tree_and_chain_are_plain(lm, options):
    plain = sj.generate(lm, PROMPTS, max_new_tokens=30)
    out = sj.generate(lm, PROMPTS, method="sdsat", max_new_tokens=30, options=options)
    for a, b in zip(out.tokens, plain.tokens, strict=True):
        np.testing.assert_array_equal(a, b)


def test_distinct_ids_do_not_stretch():
    lm = make(adaptive=(5, 6, 7))
    assert len(sj.generate(lm, PROMPTS, method="sdsat", max_new_tokens=9).tokens[0]) == 9
    with pytest.raises(OptionError, match=r"k=4.*3 distinct"):
        sj.generate(lm, PROMPTS, method="sdsat", options={"k": 4})


def test_what_makes_no_sense_is_refused(lm, target):
    bare = dataclasses.replace(lm, config=dataclasses.replace(lm.config, adaptive_ids=()))
    with pytest.raises(PairError, match=r"no adaptive tokens.*train\.sdsat"):
        sj.generate(bare, PROMPTS, method="sdsat")
    with pytest.raises(PairError, match="form=chain"):
        sj.generate(lm, PROMPTS, method="sdsat-single", options={"form": "tree"})
    with pytest.raises(PairError, match=r"rule speculative .*adaptive"):
        sj.generate(lm, PROMPTS, drafter="adaptive", rule="speculative", options={"form": "tree"})


@pytest.mark.parametrize(
    "id_",
    [pytest.param(ADAPTIVE, id="last", marks=SLOW), pytest.param(2, id="among the others")],
)
def test_adaptive_ids_are_never_emitted(id_):
    own = make(adaptive=(id_,) * 3)
    batch = functools.partial(sj.generate, own, PROMPTS[:1] * 8, max_new_tokens=60)
    for method in ("autoregressive", "sdsat", "sdsat-single"):
        out = batch(method=method, sampling=sj.Sampling(temperature=5.0))
        assert set(np.concatenate(out.tokens)) == set(range(V + 1)) - {id_}
    np.testing.assert_array_equal(batch().tokens, batch(method="sdsat-single").tokens)


# --- the law of sampled output ---------------------------------------------------------------

SAMPLING, L = sj.Sampling(temperature=0.9, top_k=4), 3


def exact_law(lm, prompt):
    grid, logits = laws.continuation_logits(lm, prompt, L)
    return laws.continuation_law(lm, grid, logits, SAMPLING)


def sampled_counts(lm, built, prompt):
    return laws.continuation_counts(Engine(lm, None, built, {}), prompt, L, SAMPLING)


def build(lm, drafter_options, rule):
    spec = sj.compose("adaptive", rule)
    return spec.build(Context(lm, None, greedy=False), drafter_options)[0]


CASES = {
    "two-step tree, match": ({"k": 2}, "match"),
    "two-step tree, specinfer": ({"k": 2}, "specinfer"),
    "two-step chain, speculative": ({"k": 2, "form": "chain"}, "speculative"),
    "two-step chain, block": ({"k": 2, "form": "chain"}, "block"),
    "single pass, speculative": ({"k": 2, "single": True}, "speculative"),
    "single pass, match": ({"k": 2, "single": True, "groups": 2}, "match"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_sampled_output_has_the_targets_law(lm, name):
    built = build(lm, *CASES[name])
    law = exact_law(lm, PROMPTS[0])
    assert laws.p_value(sampled_counts(lm, built, PROMPTS[0]), law) > laws.ALPHA


@dataclasses.dataclass(frozen=True)
class KeepsAnAdaptiveEntry(sj.DraftVerify):
    """A mutant: overwrites the newest token's cache entry with a probe's."""

    def step(self, inputs, state):
        after = super().step(inputs, state)
        rows, probe = jnp.arange(state.length.shape[0]), state.length + self.drafter.shape.depth
        kept = after.length - 2
        cache = jax.tree.map(lambda x: x.at[rows, :, kept].set(x[rows, :, probe]), after.cache)
        return after.replace(cache=cache)


@pytest.mark.slow
def test_an_adaptive_entry_left_behind_is_caught(lm):
    built = build(lm, *CASES["single pass, speculative"])
    mutant = KeepsAnAdaptiveEntry(built.drafter, built.target, built.rule)
    law = exact_law(lm, PROMPTS[0])
    assert laws.p_value(sampled_counts(lm, mutant, PROMPTS[0]), law) < laws.ALPHA
