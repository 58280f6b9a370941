"""train.sdsat: adaptive insertion, isolated windows, losses, FIM, the program."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.models import ModelConfig, head_matrix, hidden_states, init_params
from train.adaptive import (
    Insertion,
    append_windows,
    appended_slots,
    draw_windows,
    isolated_row,
    mixed_row,
    probe_row,
)
from train.data import IGNORE, pack_row
from train.errors import InputError
from train.loop import make_step
from train.sdsat_losses import Objective, probe_loss, sdsat_loss, weigh

EOS, ID = 0, 90


def some_row(seed, T=96, documents=6, padding=False):
    """A packed row of documents that end in EOS."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, documents)
    stream = rng.integers(1, 60, lengths.sum()).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    stream[offsets[1:] - 1] = EOS
    row = int(offsets[-1]) // T if padding else 0
    return pack_row(stream, offsets, np.arange(documents), offsets, row, T)


# --- insertion -------------------------------------------------------------------------------


def slow_windows(insertion, row, number):
    """Windows as §12 says them, token by token, from the same draws."""
    count = len(row["tokens"])
    key, counter = np.array([insertion.seed, number], np.uint64), np.array([0, 0, 0, 1], np.uint64)
    rng = np.random.Generator(np.random.Philox(key=key, counter=counter))
    chance, lengths = rng.random(count), rng.integers(1, insertion.window + 1, count)
    windows = []
    for start in range(count):
        if chance[start] >= insertion.rate:
            continue
        places = []
        for place in range(start, min(count, start + lengths[start])):
            same = row["segments"][place] == row["segments"][start] != 0
            if not same or row["tokens"][place] in insertion.special_ids:
                break
            places.append(place)
        if places:
            windows.append(places)
    return windows


def slow_mixed(insertion, row, windows):
    mixed, index = row["tokens"].copy(), np.zeros(len(row["tokens"]), int)
    for number, places in enumerate(windows):
        later = {window[0] for window in windows[number + 1 :]}
        for i, place in enumerate(places, start=1):
            if insertion.distinct and place in later:
                break
            mixed[place] = insertion.ids[i - 1] if insertion.distinct else insertion.ids[0]
            index[place] = i
    if not insertion.distinct:
        for place in range(len(index)):
            if index[place]:
                joined = place and row["segments"][place] == row["segments"][place - 1]
                index[place] = 1 + (index[place - 1] if joined else 0)
    return mixed, index


@pytest.mark.parametrize("ids", [(ID,) * 5, (90, 91, 92, 93, 94), (ID,)])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_insertion_equals_the_slow_reference(ids, rate):
    insertion = Insertion(ids, (EOS, 7), rate, seed=3)
    for number in range(40):
        row = some_row(number, padding=number % 3 == 0)
        windows = slow_windows(insertion, row, number)
        starts, lengths = draw_windows(insertion, row, number)
        assert [[*range(s, s + n)] for s, n in zip(starts, lengths, strict=True)] == windows
        mixed, index = slow_mixed(insertion, row, windows)
        found = mixed_row(insertion, row, number)
        np.testing.assert_array_equal(found["mixed"], mixed)
        np.testing.assert_array_equal(found["index"], index)


@pytest.mark.parametrize(("window", "share"), [(3, 0.188), (5, 0.268), (7, 0.340)])
def test_the_replaced_share_is_the_papers(window, share):
    count = 400_000
    row = {"tokens": np.ones(count, np.int32), "segments": np.ones(count, np.int32)}
    index = mixed_row(Insertion((ID,) * window, (EOS,)), row, 0)["index"]
    assert abs((index > 0).mean() - share) < 0.004
    lengths = draw_windows(Insertion((ID,) * window, (EOS,)), row, 0)[1]
    assert abs(lengths.sum() / count - 0.05 * (window + 1)) < 0.005


def test_a_rows_windows_depend_on_seed_and_number_alone():
    row, insertion = some_row(1), Insertion((ID,) * 5, (EOS,), 0.5, seed=4)
    first = mixed_row(insertion, row, 8)["mixed"]
    np.testing.assert_array_equal(first, mixed_row(insertion, row, 8)["mixed"])
    other = Insertion((ID,) * 5, (EOS,), 0.5, seed=5)
    for changed in (mixed_row(insertion, row, 9), mixed_row(other, row, 8)):
        assert (changed["mixed"] != first).any()


def test_distinct_ids_are_one_or_all_different():
    with pytest.raises(InputError, match="one repeated id or 3 distinct"):
        Insertion((90, 91, 91))


# --- the isolated layout ---------------------------------------------------------------------


def test_isolated_rows_hold_every_window_with_its_labels():
    insertion = Insertion((90, 91, 92), (EOS,), 0.2, seed=1)
    for number in range(20):
        row = some_row(number)
        T, slots = len(row["tokens"]), appended_slots(3, 0.2, 96)
        found = isolated_row(insertion, row, number)
        for name in row:
            assert found[name].shape == (T + slots,) and found[name].dtype == np.int32
            np.testing.assert_array_equal(found[name][:T], row[name])
        windows = slow_windows(insertion, row, number)
        slot = T
        for window, places in enumerate(windows, start=1):
            for i, place in enumerate(places):
                assert found["tokens"][slot] == 90 + i
                for name in ("labels", "positions", "segments"):
                    assert found[name][slot] == row[name][place]
                assert found["windows"][slot] == window and found["index"][slot] == i + 1
                assert found["starts"][slot] == row["positions"][places[0]]
                assert found["sources"][slot - T] == place
                slot += 1
        assert (found["segments"][slot:] == 0).all() and (found["labels"][slot:] == IGNORE).all()


def test_windows_beyond_the_slots_are_dropped_whole_and_fairly():
    insertion = Insertion((ID,) * 5, (), 0.9)
    row = {name: np.ones(64, np.int32) for name in ("tokens", "labels", "segments")}
    row["positions"] = np.arange(64, dtype=np.int32)
    kept, dropped = np.zeros(64), 0
    for number in range(300):
        found = isolated_row(insertion, row, number)
        slots = len(found["tokens"]) - 64
        firsts = found["sources"][(found["index"][64:] == 1)]
        kept[firsts] += 1
        dropped += len(draw_windows(insertion, row, number)[0]) - len(firsts)
        assert (found["index"] > 0).sum() <= slots
    assert dropped > 0 and abs(kept[:30].mean() - kept[30:60].mean()) < 0.03 * 300


def test_appended_slots_are_what_the_loss_promises():
    for window, promised in ((3, 0.2), (5, 0.3), (7, 0.4)):
        assert promised < appended_slots(window, 0.1, 16384) / 16384 < promised * 1.08


def test_probes_are_whole_windows():
    insertion = Insertion((ID,) * 3, (EOS,))
    row = some_row(2)
    found = probe_row(insertion, row, 5, 7)
    slots = len(found["tokens"]) - 96
    assert slots == 6 * 7
    index = found["index"][96:].reshape(6, 7)
    assert ((index == np.arange(1, 8)) | (index == 0)).all() and (index[:, 0] > 0).any()
    sources = found["sources"].reshape(6, 7)[index[:, 0] > 0]
    assert not (row["tokens"][sources] == EOS).any()
    empty = append_windows(row, np.zeros(0, int), np.zeros(0, int), 8, insertion)
    assert (empty["segments"][96:] == 0).all()


# --- losses ----------------------------------------------------------------------------------

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
    """(the plain rows, their batch as the loss wants it)."""
    rows = [some_row(number, T) for number in numbers]
    if loss == "isolated":
        laid = [isolated_row(insertion, row, n) for n, row in zip(numbers, rows, strict=True)]
    else:
        laid = [row | mixed_row(insertion, row, n) for n, row in zip(numbers, rows, strict=True)]
    return rows, {name: np.stack([row[name] for row in laid]) for name in laid[0]}


@jax.jit
def dense_log_p(params, tokens, count):
    """Log-probabilities [48, V] after each of the first ``count`` tokens, alone in a sequence."""
    places = jnp.arange(48)[None]
    hidden = hidden_states(MODEL, params, tokens[None], places, (places < count).astype(jnp.int32))
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
    """(log-probabilities [V], the place) of every adaptive token, by one forward pass each."""
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
        own = {}
        mixed, index = slow_mixed(insertion, row, slow_windows(insertion, row, number))
        for span in dense_documents(row):
            tokens = mixed[span] if objective.loss == "basic" else row["tokens"][span]
            log_p = alone(params, tokens)
            for place in range(span.start, span.stop):
                own[place] = jax.lax.stop_gradient(log_p[place - span.start])
                label = row["labels"][place]
                replaced = objective.loss == "basic" and index[place]
                if label != IGNORE and not replaced:
                    clean.append(-log_p[place - span.start][label])
        for log_p, place in dense_adaptive(params, objective.loss, insertion, row, number):
            if row["labels"][place] != IGNORE:
                share, nats = objective.self_share, -log_p[row["labels"][place]]
                kl = jnp.sum(jnp.exp(own[place]) * (own[place] - log_p))
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
    objective = Objective(loss, LONG, share, weight)
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
    insertion, objective = Insertion((ID,) * LONG, (EOS,)), Objective(loss, LONG, 0.0)
    _, batch = rows_for(loss, insertion, (0, 1, 2, 5))
    step = make_step(sdsat_loss(MODEL, objective), optax.sgd(0.1),
                     lambda batches: weigh(objective, batches))  # fmt: skip
    found = []
    for split in (1, 4):
        micro = {name: x.reshape(split, 4 // split, *x.shape[1:]) for name, x in batch.items()}
        own = jax.tree.map(jnp.copy, params)
        new, _, value, _, extras = step(own, optax.sgd(0.1).init(own), None, micro)
        found.append((value, extras, new["embed"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *found)


def test_isolated_windows_leave_the_clean_stream_alone(params):
    insertion, objective = Insertion((ID,) * LONG, (EOS,)), Objective("isolated", LONG, 1.0)
    rows, batch = rows_for("isolated", insertion, (0,))
    batch |= {"ratio": np.float32(1)}
    extras = jax.jit(sdsat_loss(MODEL, objective))(params, None, batch)[2]
    plain = {name: x[None] for name, x in rows[0].items()}
    plain |= {"mixed": plain["tokens"], "index": 0 * plain["tokens"]}
    clean = sdsat_loss(MODEL, Objective("basic", LONG))(params, None, plain)
    np.testing.assert_allclose(extras["clean_loss"][0], clean[0], rtol=1e-5)
    assert extras["adaptive_accuracy"][1].shape == (LONG,)
    assert extras["adaptive_accuracy"][1].sum() == extras["adaptive_loss"][1]
    counts = extras["adaptive_accuracy"][1]
    assert (counts[:-1] >= counts[1:]).all()


def test_probes_of_a_model_that_always_agrees_are_all_accepted(params):
    """With constant hidden states every argmax is the same."""
    insertion = Insertion((ID,) * 3, (EOS,))
    laid = [probe_row(insertion, some_row(n), n, 4) for n in (0, 1)]
    batch = {name: np.stack([row[name] for row in laid]) for name in laid[0]}
    still = params | {"norm": {"weight": jnp.zeros(16)}}
    probe = jax.jit(probe_loss(MODEL, 4))
    _, _, extras = probe(still, None, batch)
    sums, windows = extras["acceptance"]
    assert windows[0] > 0 and (sums == windows).all()
    assert extras["accepted"][0] == 4 * extras["accepted"][1]
    _, _, extras = probe(params, None, batch)
    sums = np.asarray(extras["acceptance"][0])
    assert (sums[:-1] >= sums[1:]).all() and sums[0] < windows[0]
