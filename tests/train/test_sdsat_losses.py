"""train.sdsat: losses, decoding figures, LoRA, every family."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.models import (
    ModelConfig,
    from_hf,
    head_matrix,
    hidden_states,
    init_params,
    load_pretrained,
    param_shapes,
    save_pretrained,
)
from support import variants
from support.insertion_reference import EOS, ID, slow_mixed, slow_windows, some_row
from train.config import Tuned
from train.data.in_memory import Prepared
from train.data.packing import IGNORE
from train.data.prompts import held_out_prompts
from train.engine.loop import make_step
from train.engine.losses import OutputHead
from train.sdsat import training as sdsat
from train.sdsat.evaluation import Decoding, measure_decoding, walk_rounds
from train.sdsat.insertion import Insertion, isolated_row, mixed_row, probe_row
from train.sdsat.losses import SdsatObjective, probe_loss, sdsat_loss, weigh
from train.sdsat.trainable import lora

LONG = 5  # L of the loss tests
MODEL = ModelConfig.llama(
    vocab_size=96, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24, max_position=128
)


@pytest.fixture(scope="module")
def params():
    """Scaled up, so that the distributions are far from uniform."""
    params = init_params(MODEL, jax.random.key(0))
    params["embed"] = params["embed"] * 20
    return params | {"layers": jax.tree.map(lambda x: 4 * x, params["layers"])}


def rows_for(loss, insertion, numbers, T=48):
    """(rows, the batch that the loss makes of them)."""
    rows = [some_row(number, T) for number in numbers]
    if loss == "isolated":
        out = [isolated_row(insertion, row, n) for n, row in zip(numbers, rows, strict=True)]
    else:
        out = [mixed_row(insertion, row, n) for n, row in zip(numbers, rows, strict=True)]
    return rows, {name: np.stack([row[name] for row in out]) for name in out[0]}


@jax.jit
def dense_log_p(params, tokens, count):
    """Log-probabilities [48, V] after each token of one sequence; the first ``count`` are valid."""
    places = jnp.arange(48)[None]
    hidden = hidden_states(
        MODEL, params, tokens[None], places, (places < count).astype(jnp.int32)
    ).hidden
    return jax.nn.log_softmax(hidden[0] @ head_matrix(MODEL, params).T)


def alone(params, tokens):
    """:func:`dense_log_p` of a list of tokens; padded, so that it compiles once."""
    padded = np.zeros(48, np.int32)
    padded[: len(tokens)] = tokens
    return dense_log_p(params, padded, len(tokens))


def dense_documents(row):
    """Slices of the documents in a row."""
    edges = np.flatnonzero(np.diff(row["segments"], prepend=-1, append=-1))
    spans = [slice(*pair) for pair in itertools.pairwise(edges)]
    return [span for span in spans if row["segments"][span.start]]


def dense_adaptive(params, loss, insertion, row, number):
    """(log-probabilities [V], place) of every adaptive token, each by its own forward pass."""
    windows = slow_windows(insertion, row, number)
    mixed, index = slow_mixed(insertion, row, windows)
    for span in dense_documents(row):
        if loss != "isolated":
            log_p = alone(params, mixed[span])
            for place in range(span.start, span.stop):
                if index[place]:
                    yield log_p[place - span.start], place
            continue
        for places in windows:
            if span.start <= places[0] < span.stop:
                ids = [*insertion.ids[: len(places)]]
                log_p = alone(params, [*row["tokens"][span.start : places[0]], *ids])
                for i, place in enumerate(places):
                    yield log_p[places[0] - span.start + i], place


def dense_loss(params, objective, insertion, rows, numbers):
    """½ (clean mean + w · adaptive mean) by the definition; `basic`: one mean of all."""
    clean, adaptive = [], []
    for row, number in zip(rows, numbers, strict=True):
        clean_log_p = {}
        mixed, index = slow_mixed(insertion, row, slow_windows(insertion, row, number))
        for span in dense_documents(row):
            tokens = mixed[span] if objective.loss == "basic" else row["tokens"][span]
            log_p = alone(params, tokens)
            for place in range(span.start, span.stop):
                clean_log_p[place] = jax.lax.stop_gradient(log_p[place - span.start])
                label = row["labels"][place]
                replaced = objective.loss == "basic" and index[place]
                if label != IGNORE and not replaced:
                    clean.append(-log_p[place - span.start][label])
        for log_p, place in dense_adaptive(params, objective.loss, insertion, row, number):
            if row["labels"][place] != IGNORE:
                share, nats = objective.self_share, -log_p[row["labels"][place]]
                kl = jnp.sum(jnp.exp(clean_log_p[place]) * (clean_log_p[place] - log_p))
                adaptive.append((1 - share) * nats + share * kl)
    if objective.loss == "basic":
        return jnp.mean(jnp.stack(clean + adaptive))
    means = jnp.mean(jnp.stack(clean)), jnp.mean(jnp.stack(adaptive))
    return 0.5 * (means[0] + objective.weight * means[1])


CASES = [
    ("basic", 0.0, 1.0, False),
    ("improved", 0.0, 1.0, False),
    ("improved", 1.0, 0.7, False),
    ("isolated", 0.0, 1.0, True),
    ("isolated", 1.0, 1.0, False),
    ("isolated", 0.5, 2.0, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "share", "weight", "distinct"), CASES)
def test_losses_and_gradients_equal_the_dense_reference(params, loss, share, weight, distinct):
    ids = tuple(range(90, 95)) if distinct else (ID,) * LONG
    insertion, numbers = Insertion(ids, (EOS,), 0.15, seed=2), (0, 3)
    objective = SdsatObjective(loss, LONG, share, weight)
    rows, batch = rows_for(loss, insertion, numbers)

    def ours(params):
        ready = weigh(objective, {name: x[None] for name, x in batch.items()})
        one = jax.tree.map(lambda x: x[0], ready)
        total, count, _ = sdsat_loss(MODEL, objective)(params, None, one)
        return total / count

    value, grads = jax.jit(jax.value_and_grad(ours))(params)
    want, dense = jax.value_and_grad(dense_loss)(params, objective, insertion, rows, numbers)
    np.testing.assert_allclose(value, want, rtol=2e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(dense), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()) + 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["basic", "improved", "isolated"])
def test_means_run_over_the_accumulated_batch(params, loss):
    insertion, objective = Insertion((ID,) * LONG, (EOS,)), SdsatObjective(loss, LONG, 0.0)
    _, batch = rows_for(loss, insertion, (0, 1, 2, 5))
    step = make_step(
        sdsat_loss(MODEL, objective), optax.sgd(0.1), lambda batches: weigh(objective, batches)
    )
    results = []
    for split in (1, 4):
        micro = {name: x.reshape(split, 4 // split, *x.shape[1:]) for name, x in batch.items()}
        copy = jax.tree.map(jnp.copy, params)
        new, _, value, _, extras = step(copy, optax.sgd(0.1).init(copy), None, micro)
        results.append((value, extras, new["embed"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *results)


def test_logits_are_capped_if_the_model_caps_them():
    table, hidden = jax.random.normal(jax.random.key(1), (2, 9, 4))
    hidden, labels = hidden[None], jnp.array([[3, 1, IGNORE, *range(6)]])
    head = OutputHead.of(dataclasses.replace(MODEL, logit_softcap=2.0), {"embed": table})
    log_p = jax.nn.log_softmax(2 * jnp.tanh(hidden @ table.T / 2))
    want = -sum(log_p[0, i, label] for i, label in enumerate(labels[0]) if label != IGNORE)
    np.testing.assert_allclose(head.cross_entropy(hidden, labels)[0], want, rtol=1e-5)
    np.testing.assert_array_equal(head.argmax(hidden), log_p.argmax(-1))


def test_isolated_windows_do_not_change_the_clean_sequence(params):
    insertion, objective = Insertion((ID,) * LONG, (EOS,)), SdsatObjective("isolated", LONG, 1.0)
    rows, batch = rows_for("isolated", insertion, (0,))
    batch |= {"ratio": np.float32(1)}
    extras = jax.jit(sdsat_loss(MODEL, objective))(params, None, batch)[2]
    plain = {name: x[None] for name, x in rows[0].items()}
    plain |= {"mixed": plain["tokens"], "index": 0 * plain["tokens"]}
    clean = sdsat_loss(MODEL, SdsatObjective("basic", LONG))(params, None, plain)
    np.testing.assert_allclose(extras["loss"][0], clean[0], rtol=1e-5)
    assert extras["adaptive_accuracy"][1].shape == (LONG,)
    assert extras["adaptive_accuracy"][1].sum() == extras["adaptive_loss"][1]
    counts = extras["adaptive_accuracy"][1]
    assert (counts[:-1] >= counts[1:]).all()


def test_held_out_windows_of_a_model_that_always_agrees_are_all_accepted(params):
    """With constant hidden states every argmax is the same."""
    insertion = Insertion((ID,) * 3, (EOS,))
    out = [probe_row(insertion, some_row(n), n, 4) for n in (0, 1)]
    batch = {name: np.stack([row[name] for row in out]) for name in out[0]}
    still = params | {"norm": {"weight": jnp.zeros(16)}}
    probe = jax.jit(probe_loss(MODEL, 4))
    _, _, extras = probe(still, None, batch)
    sums, windows = extras["acceptance"]
    assert windows[0] > 0 and (sums == windows).all()
    assert extras["accepted"][0] == 4 * extras["accepted"][1]
    _, _, extras = probe(params, None, batch)
    sums = np.asarray(extras["acceptance"][0])
    assert (sums[:-1] >= sums[1:]).all() and sums[0] < windows[0]


# --- decoding figures ------------------------------------------------------------------------


def slow_rounds(params, prompt, new, length, insertion):
    """Two-step decoding by whole forward passes: accepted drafts of each round."""
    text, end, accepted = list(prompt), len(prompt) + len(new), []
    while len(text) < end - length:
        # text ends in the pending token t; pass 1 gives m_0..m_k, pass 2 checks them
        first = alone(params, [*text, *insertion.ids[:1] * length])
        m = [int(first[len(text) - 1 + i].argmax()) for i in range(length + 1)]
        second = alone(params, [*text, *m])
        z = [int(second[len(text) + i].argmax()) for i in range(length + 1)]
        n = next((i for i in range(length) if m[i + 1] != z[i]), length)
        text += [m[0], *z[: n + 1]]
        accepted.append(n)
    return accepted


def test_measured_rounds_are_those_of_two_step_decoding(params):
    insertion = Insertion((ID,) * LONG)
    prompts = tuple(tuple(range(5 + i, 25 + i)) for i in range(4))
    decoding = Decoding(prompts, 20, 4)
    figures, written = measure_decoding(MODEL, insertion, decoding, params)
    rounds = []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(20):
            text.append(int(alone(params, text)[len(text) - 1].argmax()))
        rounds += slow_rounds(params, prompt, text[20:], 4, insertion)
        if prompt == prompts[0]:
            assert written == text[20:]
    assert {0} < set(rounds), "some drafts are accepted, some are not"
    want = [np.mean([n > i for n in rounds]) for i in range(4)]
    np.testing.assert_allclose(figures["decode_acceptance"], want, atol=1e-6)
    np.testing.assert_allclose(figures["decode_tokens_per_round"], 2 + np.mean(rounds), atol=1e-6)


def test_prompts_are_spread_over_the_held_out_documents_of_each_source():
    offsets = np.array([0, 100, 130, 330, 500, 600, 700])
    empty = np.zeros(0, int)
    data = Prepared(
        train=empty,
        train_offsets=np.zeros(1, int),
        valid=np.arange(700),
        valid_offsets=offsets,
        valid_ends=np.array([5, 6]),
        source_names=np.array(["many", "few"]),
        source_tokens=np.array([900, 100]),
        near_duplicates=empty,
    )
    # The second document is shorter than a prompt. The last one is the only one of its source.
    assert [prompt[0] for prompt in held_out_prompts(data, 5)] == [0, 130, 330, 500, 600]
    assert [prompt[0] for prompt in held_out_prompts(data, 3)] == [0, 500, 600]
    assert {len(prompt) for prompt in held_out_prompts(data, 5)} == {64}
    assert held_out_prompts(data, 0) == ()


def test_rounds_advance_by_two_and_the_accepted_tokens():
    assert walk_rounds(np.array([1, 9, 9, 0, 9, 2])) == [1, 0, 2]


# --- families --------------------------------------------------------------------------------

FAMILY_MODELS = (
    "mistral",
    "qwen2-window",
    "pythia",
    "gpt2",
    "opt",
    "opt-350m",
    "bloom",
    "gemma2",
    "gemma3",
    "gptj",
    "phi",
)


@pytest.mark.parametrize("name", ["gpt2", "gptj"])
def test_new_rows_have_the_models_shapes(name):
    start = from_hf(variants.config(name))
    grown = jax.eval_shape(lambda p: sdsat.grow(p, (61, 62), 2), param_shapes(start))
    wanted = param_shapes(dataclasses.replace(start, vocab_size=63))
    assert jax.tree.map(jnp.shape, grown) == jax.tree.map(jnp.shape, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_every_family_is_grown_trained_and_read_back(name, tmp_path):
    start = from_hf(variants.config(name))
    params = init_params(start, jax.random.key(0))
    cfg = dataclasses.replace(start, vocab_size=62, adaptive_ids=(61, 61, 61))
    grown = sdsat.grow(params, (61,), 1)
    assert jax.tree.map(jnp.shape, grown) == jax.tree.map(lambda x: x.shape, param_shapes(cfg))
    row, insertion = some_row(1, 48), Insertion((61,) * 3, (EOS,))
    batch = {name: x[None] for name, x in isolated_row(insertion, row, 0).items()}
    plain = {name: x[None] for name, x in row.items()}
    plain |= {"mixed": plain["tokens"], "index": 0 * plain["tokens"]}
    loss = sdsat_loss(cfg, SdsatObjective("isolated", 3, 1.0))
    grads, extras = jax.jit(
        jax.grad(lambda p: loss(p, None, batch | {"ratio": 1.0})[::2], has_aux=True)
    )(grown)
    clean = jax.jit(sdsat_loss(cfg, SdsatObjective("basic", 3)))(grown, None, plain)
    np.testing.assert_allclose(extras["loss"][0], clean[0], rtol=1e-5)
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))
    assert jnp.abs(grads["embed"][61]).max() > 0
    save_pretrained(tmp_path, cfg, grown)
    again, read = load_pretrained(tmp_path)
    assert again == cfg
    jax.tree.map(np.testing.assert_array_equal, read, grown)


def test_lora_starts_at_the_model_and_merges_its_products(params):
    tuned = lora((90, 91), Tuned(lora_rank=3, lora_alpha=6.0), seed=0)
    trainable, frozen = tuned.split(params)
    same = tuned.merge(trainable, frozen)
    jax.tree.map(np.testing.assert_array_equal, same, params)
    pair = trainable["layers"]["1"]["mlp"]["down"]
    pair["up"] = jnp.ones_like(pair["up"])
    merged = tuned.merge(trainable, frozen)["layers"]["1"]["mlp"]["down"]["weight"]
    plain = params["layers"]["1"]["mlp"]["down"]["weight"]
    np.testing.assert_allclose(merged - plain, 2 * pair["up"] @ pair["down"], rtol=1e-3, atol=1e-5)
