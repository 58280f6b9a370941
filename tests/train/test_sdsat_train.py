"""train.sdsat: adaptive insertion, isolated windows, losses, FIM, the program."""

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tokenizers import Tokenizer

import specjax as sj
from specjax.errors import InputError, SpecjaxError
from specjax.infill import Sentinels, find_sentinels
from specjax.models import (
    ModelConfig,
    from_hf,
    head_matrix,
    hidden_states,
    init_params,
    load_pretrained,
    logits_of,
    num_params,
    param_shapes,
    save_pretrained,
)
from support import variants
from train.cli import run_program
from train.config import SDSATConfig, from_toml
from train.data.corpus import Document, is_held_out
from train.data.fim import CodeLayout
from train.data.packing import IGNORE, Plain, Prepared, pack_row, prepare
from train.data.tokenizer import EOS_ID, train_tokenizer
from train.engine.loop import Metrics, event_writer, make_step
from train.engine.placement import shared_axis
from train.sdsat import ablation
from train.sdsat import program as sdsat
from train.sdsat import trainable as tuning
from train.sdsat.evaluation import Decoding, held_out_prompts, measure_decoding, walk_rounds
from train.sdsat.insertion import (
    Insertion,
    append_windows,
    appended_slots,
    draw_windows,
    isolated_row,
    mixed_row,
    probe_row,
)
from train.sdsat.losses import Head, Objective, probe_loss, sdsat_loss, weigh

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "configs" / "sdsat_tiny.toml")

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
    step = make_step(
        sdsat_loss(MODEL, objective), optax.sgd(0.1), lambda batches: weigh(objective, batches)
    )
    found = []
    for split in (1, 4):
        micro = {name: x.reshape(split, 4 // split, *x.shape[1:]) for name, x in batch.items()}
        own = jax.tree.map(jnp.copy, params)
        new, _, value, _, extras = step(own, optax.sgd(0.1).init(own), None, micro)
        found.append((value, extras, new["embed"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *found)


def test_heads_cap_their_logits_where_the_model_does():
    table, hidden = jax.random.normal(jax.random.key(1), (2, 9, 4))
    hidden, labels = hidden[None], jnp.array([[3, 1, IGNORE, *range(6)]])
    head = Head.of(dataclasses.replace(MODEL, logit_softcap=2.0), {"embed": table})
    log_p = jax.nn.log_softmax(2 * jnp.tanh(hidden @ table.T / 2))
    want = -sum(log_p[0, i, label] for i, label in enumerate(labels[0]) if label != IGNORE)
    np.testing.assert_allclose(head.cross_entropy(hidden, labels)[0], want, rtol=1e-5)
    np.testing.assert_array_equal(head.argmax(hidden), log_p.argmax(-1))


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


# --- decoding figures ------------------------------------------------------------------------


def slow_rounds(params, prompt, new, length, insertion):
    """Two-step decoding by whole forward passes: accepted drafts of each round."""
    text, end, found = list(prompt), len(prompt) + len(new), []
    while len(text) < end - length:
        # text ends in the pending token t; pass 1 gives m_0..m_k, pass 2 checks them
        first = alone(params, [*text, *insertion.ids[:1] * length])
        m = [int(first[len(text) - 1 + i].argmax()) for i in range(length + 1)]
        second = alone(params, [*text, *m])
        z = [int(second[len(text) + i].argmax()) for i in range(length + 1)]
        n = next((i for i in range(length) if m[i + 1] != z[i]), length)
        text += [m[0], *z[: n + 1]]
        found.append(n)
    return found


def test_measured_rounds_are_those_of_two_step_decoding(params):
    insertion = Insertion((ID,) * LONG)
    prompts = tuple(tuple(range(5 + i, 25 + i)) for i in range(4))
    decoding = Decoding(prompts, 20, 4)
    found = measure_decoding(MODEL, insertion, decoding, params)
    rounds = []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(20):
            text.append(int(alone(params, text)[len(text) - 1].argmax()))
        rounds += slow_rounds(params, prompt, text[20:], 4, insertion)
    assert {0} < set(rounds), "some drafts are accepted, some are not"
    want = [np.mean([n > i for n in rounds]) for i in range(4)]
    np.testing.assert_allclose(found["decode_acceptance"], want, atol=1e-6)
    np.testing.assert_allclose(found["decode_tokens_per_round"], 2 + np.mean(rounds), atol=1e-6)
    assert measure_decoding(MODEL, insertion, Decoding((), 20, 4), params) == {}


def test_prompts_come_from_the_rows_that_are_evaluated():
    offsets = np.array([0, 100, 130, 330, 500])
    data = Prepared(np.zeros(0), np.zeros(1), np.arange(500), offsets, 0)
    found = held_out_prompts(data, 5, within=300)
    assert [prompt[0] for prompt in found] == [0, 130] and {len(p) for p in found} == {64}
    assert held_out_prompts(data, 0, 500) == held_out_prompts(data, 3, 0) == ()


def test_rounds_advance_by_two_and_what_was_accepted():
    assert walk_rounds(np.array([1, 9, 9, 0, 9, 2])) == [1, 0, 2]


# --- fill in the middle ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    paths = sorted((ROOT / "specjax").glob("*.py"))
    documents = [Document(path.name, path.read_text()) for path in paths]
    return train_tokenizer(documents, 400, tmp_path_factory.mktemp("tok") / "tokenizer.json")


def test_rearranged_documents_put_their_parts_in_codellamas_order(tokenizer):
    marks = find_sentinels(tokenizer)
    assert marks == Sentinels(1, 2, 3, 4)
    layout = CodeLayout(EOS_ID, None, marks, fim_rate=0.5, seed=1)
    kinds = {"plain": 0, "psm": 0, "spm": 0}
    for i in range(400):
        document = Document(f"d/{i}.py", f"def f{i}(x):\n    return {i}\n")
        pieces = layout.pieces(document)
        if pieces == [document.text, EOS_ID]:
            kinds["plain"] += 1
        elif pieces[1] == marks.suffix:
            _, _, suffix, middle, both, end = pieces
            assert (middle, end, both + suffix) == (marks.middle, marks.end, document.text)
            kinds["spm"] += 1
        else:
            first, prefix, second, suffix, third, middle, end = pieces
            assert (first, second, third, end) == (1, 2, 3, 4)
            assert prefix + middle + suffix == document.text
            kinds["psm"] += 1
        if is_held_out(document.name):
            assert pieces == [document.text, EOS_ID]
    assert 180 < kinds["plain"] < 250 and kinds["psm"] > 70 and kinds["spm"] > 70


def test_rearranged_documents_are_tokenised_once_and_cached_apart(tokenizer, tmp_path):
    documents = [Document(f"d/{i}.py", f"x{i} = {i}\n" * 9) for i in range(40)]
    plain = prepare(documents, tokenizer, tmp_path)
    assert (prepare(documents, tokenizer, tmp_path, Plain()).train == plain.train).all()
    layout = CodeLayout(EOS_ID, None, find_sentinels(tokenizer), 1.0)
    fim = prepare(documents, tokenizer, tmp_path, layout)
    assert (fim.valid == plain.valid).all() and (fim.train == 3).sum() == len(fim.train_offsets) - 1
    ends = fim.train[fim.train_offsets[1:] - 1]
    assert (ends == 4).all() and not (fim.train == EOS_ID).any()
    assert (prepare(documents, tokenizer, tmp_path, layout).train == fim.train).all()


def test_a_tokenizer_that_adds_a_space_does_so_at_the_start_only(tmp_path):
    """As CodeLlama's: a suffix is encoded as the middle of a text."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<s>", "\n", "▁", *"abc"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    spaced = Tokenizer(models.BPE(vocab, []))
    spaced.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    spaced.decoder = decoders.Replace("▁", " ")
    layout = CodeLayout(0, 0, Sentinels(10, 11, 12, 13), 1.0)
    documents = [Document(f"d/{i}.py", "abcabcabc") for i in range(30)]
    data = prepare(documents, spaced, None, layout)
    spaces = 0
    for begin, end in itertools.pairwise(data.train_offsets):
        spaces += (data.train[begin:end] == vocab["▁"]).sum()
        assert data.train[begin] == 0, "BOS"
    assert spaces <= len(data.train_offsets) - 1
    assert not (data.train == vocab["\n"]).any()


# --- the program -----------------------------------------------------------------------------


def program(*argv):
    return run_program(
        "train.sdsat",
        sdsat.__doc__,
        SDSATConfig,
        sdsat.main,
        (InputError, SpecjaxError),
        [TINY, *map(str, argv)],
    )


@pytest.fixture(scope="module")
def start(tokenizer, tmp_path_factory):
    """A random model's Hugging Face directory, its head apart from its embedding."""
    cfg = ModelConfig.llama(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        intermediate_size=24,
        max_position=128,
        tie_embeddings=False,
        eos_ids=(EOS_ID,),
    )
    directory = tmp_path_factory.mktemp("start")
    save_pretrained(directory, cfg, init_params(cfg, jax.random.key(1)), tokenizer.to_str())
    return directory


@pytest.fixture
def quick(start, monkeypatch):
    """Arguments of a run in a directory; more are appended as section.key=value."""
    monkeypatch.chdir(ROOT)

    def arguments(directory, *settings):
        settings = (f"run.dir={directory}", f"model.init_from={start}", *settings)
        return [word for setting in settings for word in ("--set", setting)]

    return arguments


def lines(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


def test_runs_log_their_parts_and_end_in_a_directory_that_knows_its_ids(quick, tmp_path, start):
    assert program(*quick(tmp_path / "run", "sdsat.decode_prompts=0")) == 0
    trained = [row for row in lines(tmp_path / "run") if "loss" in row]
    assert len(trained) == 20 and len(trained[0]["adaptive_accuracy"]) == 3
    for row in trained:
        np.testing.assert_allclose(
            row["loss"], (row["clean_loss"] + row["adaptive_loss"]) / 2, rtol=1e-4
        )
    assert trained[-1]["clean_loss"] < trained[0]["clean_loss"]
    held_out = [row for row in lines(tmp_path / "run") if "valid_loss" in row]
    assert [row["step"] for row in held_out] == [10, 20]
    assert len(held_out[0]["valid_acceptance"]) == 3
    cfg, params = load_pretrained(tmp_path / "run" / "export")
    assert cfg.adaptive_ids == (400, 400, 400) and cfg.vocab_size == 401
    assert params["embed"].shape == params["head"].shape == (401, 16)
    card = json.loads((tmp_path / "run" / "export" / "card.json").read_text())
    assert card["adaptive_ids"] == [400] and card["recipe"]["sdsat"]["window"] == 3


def test_event_files_hold_every_place_of_a_list(tmp_path):
    events = event_writer(tmp_path / "events", 0)
    metrics = Metrics(tmp_path / "metrics.jsonl", 0, events)
    metrics.write(step=1, loss=2.5, adaptive_accuracy=[0.5, None, 0.25])
    metrics.close()
    (file,) = (tmp_path / "events").iterdir()
    found = file.read_bytes()
    assert b"loss" in found and b"adaptive_accuracy/3" in found
    assert b"adaptive_accuracy/2" not in found and b"step" not in found


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["isolated", "improved"])
def test_killed_and_resumed_gives_the_same_numbers(quick, tmp_path, loss):
    targets = "self" if loss == "isolated" else "data"
    settings = (f"sdsat.loss={loss}", f"sdsat.adaptive_targets={targets}", "run.log_every=3")
    whole, broken = quick(tmp_path / "whole", *settings), quick(tmp_path / "broken", *settings)
    assert program(*whole) == 0
    command = [sys.executable, "-m", "train.sdsat", TINY, *broken]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (tmp_path / "broken/checkpoints/5").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert program(*broken, "--resume") == 0
    assert lines(tmp_path / "broken") == lines(tmp_path / "whole")
    assert len(lines(tmp_path / "whole")[-1]["valid_decode_acceptance"]) == 3
    files = [tmp_path / name / "export/model.safetensors" for name in ("whole", "broken")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [1, 4])
def test_eight_devices_give_the_losses_of_one(quick, tmp_path, fsdp):
    settings = ("optim.batch_size=8", "optim.total_steps=6", f"mesh.fsdp={fsdp}")
    devices = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "train.sdsat", TINY, *quick(tmp_path / "many", *settings)]
    subprocess.run(command, env=devices, check=True, capture_output=True)
    assert program(*quick(tmp_path / "one", *settings[:2])) == 0
    for many, one in zip(lines(tmp_path / "many"), lines(tmp_path / "one"), strict=True):
        assert many.keys() == one.keys()
        for name in ("loss", "clean_loss", "adaptive_loss", "grad_norm", "valid_loss"):
            if name in one:
                np.testing.assert_allclose(many[name], one[name], rtol=2e-4, err_msg=name)
    # A checkpoint of eight devices is gone on with on one, and the other way round.
    longer = (*settings[:1], "optim.total_steps=8")
    assert program(*quick(tmp_path / "many", *longer), "--resume") == 0


def test_large_arrays_are_split_along_their_longest_axis_that_divides():
    spec = jax.sharding.PartitionSpec
    assert shared_axis((4097, 512), 8) == spec(None, "fsdp")
    assert shared_axis((4096, 512), 8) == spec("fsdp")
    assert shared_axis((512,), 8) == shared_axis((4097, 3), 8) == spec()
    assert shared_axis((4096, 512), 1) == spec()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["embeddings", "lora"])
def test_parts_of_a_model_are_trained_and_merged(quick, tmp_path, start, part):
    settings = (f"model.train={part}", "sdsat.distinct=true", "sdsat.loss=improved")
    assert program(*quick(tmp_path / "run", *settings, "model.lora_rank=2")) == 0
    cfg, found = load_pretrained(tmp_path / "run" / "export")
    _, before = load_pretrained(start)
    assert cfg.adaptive_ids == (400, 401, 402)
    moved = jax.tree.map(lambda a, b: bool((a[: len(b)] != b).any()), found, before)
    matrices = moved["layers"]["0"]["attention"]["q"]["weight"]
    assert (matrices, moved["embed"]) == ((False, True) if part == "embeddings" else (True, False))
    rows = np.asarray(found["embed"][400:])
    assert (rows[0] != rows[1]).any() and not moved["norm"]["weight"]


def test_lora_starts_at_the_model_and_merges_its_products(params):
    tuned = tuning.lora((90, 91), 3, 6.0, seed=0)
    trainable, frozen = tuned.split(params)
    same = tuned.merge(trainable, frozen)
    jax.tree.map(np.testing.assert_array_equal, same, params)
    pair = trainable["layers"]["1"]["mlp"]["down"]["weight"]
    pair["up"] = jnp.ones_like(pair["up"])
    merged = tuned.merge(trainable, frozen)["layers"]["1"]["mlp"]["down"]["weight"]
    plain = params["layers"]["1"]["mlp"]["down"]["weight"]
    np.testing.assert_allclose(merged - plain, 2 * pair["up"] @ pair["down"], rtol=1e-3, atol=1e-5)


def test_new_rows_and_unused_rows_start_at_the_mean():
    params = {"embed": jnp.arange(12.0).reshape(4, 3), "head": jnp.ones((4, 3))}
    grown = sdsat.grow(params, (3, 4), 1)
    assert grown["embed"].shape == grown["head"].shape == (5, 3)
    for row in (3, 4):
        np.testing.assert_allclose(grown["embed"][row], [3, 4, 5])


def test_ids_come_from_the_config_the_checkpoint_unused_vocabulary_or_new_rows(tokenizer):
    def choose(vocab, had=(), **section):
        cfg = from_toml(SDSATConfig, TINY).sdsat
        cfg = type(cfg)(**{**vars(cfg), **section})
        model = ModelConfig.llama(
            vocab_size=vocab,
            hidden_size=16,
            num_layers=1,
            num_heads=2,
            intermediate_size=24,
            adaptive_ids=had,
            eos_ids=(0,),
        )
        return sdsat.choose_ids(cfg, model, tokenizer)

    assert choose(400) == ((400,), 1)
    assert choose(402) == ((400,), 0)
    assert choose(402, distinct=True) == ((402, 403, 404), 3)
    assert choose(408, distinct=True) == ((400, 401, 402), 0)
    assert choose(408, had=(405, 405)) == ((405,), 0)
    assert choose(408, ids=(407,)) == ((407,), 0)


def test_reserved_tokens_of_the_tokenizer_serve_where_the_corpus_lacks_them(
    tokenizer, quick, start, tmp_path, capsys
):
    where = tmp_path / "reserved"
    where.mkdir()
    grown = Tokenizer.from_str(tokenizer.to_str())
    grown.add_tokens(["<reserved>"])
    cfg, params = load_pretrained(start)
    cfg = dataclasses.replace(cfg, vocab_size=402)
    save_pretrained(where, cfg, sdsat.grow(params, (400, 401), 2), grown.to_str())
    settings = (f"model.init_from={where}", "sdsat.ids=[400]", "sdsat.decode_prompts=0")
    assert program(*quick(tmp_path / "run", *settings, "optim.total_steps=2")) == 0
    tuned = sj.load(tmp_path / "run" / "export")
    assert tuned.config.adaptive_ids == (400,) * 3 and tuned.vocab_limit == 401
    hot = sj.Sampling(temperature=9.0)
    out = sj.generate(tuned, [[7, 8]] * 8, method="sdsat", max_new_tokens=40, sampling=hot)
    assert max(int(tokens.max()) for tokens in out.tokens) < 400
    capsys.readouterr()
    text = next(tmp_path / f"{i}.txt" for i in range(99) if not is_held_out(f"{i}.txt"))
    text.write_text("a <reserved> word\n" * 50)
    held = [f"model.init_from={where}", "sdsat.ids=[400]", f'data.files=["{text}"]']
    assert program(*quick(tmp_path / "other", *held)) == 2
    assert "400 is '<reserved>', which the corpus holds" in capsys.readouterr().err


def test_bad_input_exits_2_with_one_line(quick, tmp_path, start, capsys):
    held = next(f"{i}.txt" for i in range(1000) if is_held_out(f"{i}.txt"))
    (tmp_path / "empty").mkdir()
    (tmp_path / held).write_text("y = 3\n" * 90)
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (plain / name).write_bytes((start / name).read_bytes())
    text = (plain / "tokenizer.json").read_text()
    (plain / "tokenizer.json").write_text(text.replace("fim_suffix", "other"))
    cases = [
        (("sdsat.distinct=true", "sdsat.probe_length=4"), "3 distinct ids"),
        (("sdsat.distinct=true", "sdsat.ids=[1]"), "ask for 3 distinct"),
        (("sdsat.ids=[300]",), "300 is "),
        (("sdsat.ids=[0]",), "real text uses"),
        (("sdsat.ids=[4000]",), "outside the vocabulary of 400"),
        (("sdsat.ids=[3]", "sdsat.fim_rate=0.5"), "3 is '<|fim_middle|>'"),
        (("data.seq_len=256",), "longer than the model's context (128)"),
        ((f"model.init_from={plain}", "sdsat.fim_rate=0.5"), "no fill-in-the-middle sentinels"),
        ((f'data.files=["{tmp_path}/empty"]',), "the corpus is empty"),
        ((f'data.files=["{tmp_path}/{held}"]',), "is left for training"),
        (("sdsat.windw=3",), "did you mean sdsat.window"),
        (("sdsat.ids=[1.5]",), "list of integers"),
        (("model.init_from=/no/model",), "/no/model"),
        (("model.init_from=",), "name a Hugging Face directory"),
        (("sdsat.loss=basic",), "needs a clean stream"),
        (("sdsat.start_rate=0",), "only loss basic"),
        (("model.train=lora", "optim.optimizer=muon"), "only adamw"),
        (("mesh.fsdp=3",), "does not divide the 1 devices"),
    ]
    for number, (settings, says) in enumerate(cases):
        assert program(*quick(tmp_path / f"run{number}", *settings)) == 2, settings
        out = capsys.readouterr()
        assert out.out == "" and "Traceback" not in out.err, settings
        assert says in out.err.strip().splitlines()[-1], (settings, out.err)
        assert not list((tmp_path / f"run{number}").glob("metrics*"))


@pytest.mark.slow
def test_damaged_checkpoints_and_other_settings_are_refused(quick, tmp_path, capsys):
    directory = tmp_path / "run"
    assert program(*quick(directory)) == 0
    capsys.readouterr()
    for settings, argv, says in (
        ((), (), "go on with --resume"),
        (("sdsat.window=4",), ("--resume",), "sdsat.window"),
        (("sdsat.loss=improved",), ("--resume",), "sdsat.loss"),
    ):
        assert program(*quick(directory, *settings), *argv) == 2
        assert says in capsys.readouterr().err
    before = (directory / "metrics.jsonl").read_text()
    for file in (directory / "checkpoints/20").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    assert program(*quick(directory), "--resume") == 2
    assert "is damaged" in capsys.readouterr().err
    assert (directory / "metrics.jsonl").read_text() == before


def test_isolated_windows_cost_three_quarters_of_two_sequences_at_16k():
    seven_b = ModelConfig.llama(
        vocab_size=32016,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        intermediate_size=11008,
        tie_embeddings=False,
    )
    flops = {}
    for loss in ("basic", "improved", "isolated"):
        flops[loss] = sdsat.forward_flops(seven_b, loss, 5, 0.1, 16384) / 16384
    dense = 2 * (num_params(seven_b) - 32016 * 4096) + 4 * 16384 * 4096 * 32
    np.testing.assert_allclose(flops["basic"], dense, rtol=1e-3)
    assert flops["improved"] == 2 * flops["basic"]
    assert flops["isolated"] < 0.75 * flops["improved"]


@pytest.mark.slow
def test_the_ablation_keeps_what_is_finished_and_reports_it(start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    settings = [f"run.dir={tmp_path}", f"model.init_from={start}", "sdsat.decode_prompts=0"]

    def run(names, steps):
        words = [*settings, f"optim.total_steps={steps}"]
        changes = [word for setting in words for word in ("--set", setting)]
        return ablation.main([TINY, *changes, "--only", names])

    assert run("none", 3) == 0
    card = (tmp_path / "none/export/card.json").stat().st_mtime_ns
    assert run("none,improved-data", 3) == 0
    assert (tmp_path / "none/export/card.json").stat().st_mtime_ns == card
    rows = json.loads((tmp_path / "ablation.json").read_text())
    assert [row["variant"] for row in rows] == ["none", "improved-data"]
    base, improved = (row["clean_loss"] for row in rows)
    assert f"{improved / base - 1:+.2%}" in (tmp_path / "ablation.md").read_text()
    assert (tmp_path / "ablation.png").exists()
    capsys.readouterr()
    assert run("none", 4) == 2 and "another optim.total_steps" in capsys.readouterr().err
    assert run("nothing", 3) == 2 and "--only nothing" in capsys.readouterr().err


@pytest.mark.parametrize("loss", ["basic", "isolated"])
def test_counted_operations_are_the_compilers(loss):
    """Of the blocks, dense attention included; the head runs in chunks, which it counts once."""
    cfg = ModelConfig.llama(
        vocab_size=64, hidden_size=128, num_layers=2, num_heads=4, intermediate_size=256
    )
    T, window, rate = 256, 3, 0.1
    tokens = T + (appended_slots(window, rate, T) if loss == "isolated" else 0)
    row = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    run = jax.jit(lambda params, *row: hidden_states(cfg, params, *row))
    found = run.lower(param_shapes(cfg), row, row, row).compile().cost_analysis()["flops"]
    counted = sdsat.forward_flops(cfg, loss, window, rate, T)
    head = 2 * tokens * cfg.vocab_size * cfg.hidden_size
    np.testing.assert_allclose(found, counted - head, rtol=0.05)


def test_dry_run_counts_tokens_and_writes_nothing(quick, tmp_path, capsys):
    assert program(*quick(tmp_path / "run", "data.seq_len=128"), "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["clean_tokens_per_step"] == 512 and 614 < plan["forward_tokens_per_step"] < 900
    assert plan["new_rows"] == 1 and list(tmp_path.iterdir()) == []


@pytest.mark.torch
@pytest.mark.slow
def test_transformers_loads_the_export_with_equal_logits(quick, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    assert program(*quick(tmp_path / "run", "optim.total_steps=3")) == 0
    where = tmp_path / "run" / "export"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
    cfg, params = load_pretrained(where)
    assert theirs.config.adaptive_ids == [400, 400, 400]
    tokens = np.array([[7, 30, 200, 400, 400]], np.int32)
    places = np.arange(5)[None]
    hidden = hidden_states(cfg, params, tokens, places, np.ones_like(tokens))
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    ours = np.asarray(logits_of(cfg, params, hidden))
    np.testing.assert_allclose(ours[..., :400], want[..., :400], atol=1e-4)
    assert np.isneginf(ours[..., 400]).all()  # an adaptive id is an input alone


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
)


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
    loss = sdsat_loss(cfg, Objective("isolated", 3, 1.0))
    grads, extras = jax.jit(
        jax.grad(lambda p: loss(p, None, batch | {"ratio": 1.0})[::2], has_aux=True)
    )(grown)
    clean = jax.jit(sdsat_loss(cfg, Objective("basic", 3)))(grown, None, plain)
    np.testing.assert_allclose(extras["clean_loss"][0], clean[0], rtol=1e-5)
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))
    assert jnp.abs(grads["embed"][61]).max() > 0
    save_pretrained(tmp_path, cfg, grown)
    again, found = load_pretrained(tmp_path)
    assert again == cfg
    jax.tree.map(np.testing.assert_array_equal, found, grown)
