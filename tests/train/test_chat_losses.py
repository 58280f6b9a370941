"""Every objective trains answers alone, whatever else stands in a row."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.models import ModelConfig, hidden_states, init_params
from specjax.models.config import ExpertsConfig
from specjax.models.families.head_config import HeadConfig
from specjax.models.head import share_embedding
from support import chats
from support.training import ROOT, logged, overrides, save_checkpoint
from train.config import DataSection
from train.data.encoding import Plain
from train.data.loader import training_rows
from train.data.packing import ANSWERS, IGNORE, stack, without_answers
from train.engine.batches import open_corpus
from train.engine.loop import make_step
from train.engine.losses import row_arguments
from train.engine.starting import with_router_loss
from train.head import losses as head_losses
from train.head.__main__ import main as train_head
from train.head.losses import HeadObjective, head_loss, labels_of_step
from train.lm import losses as lm_losses
from train.lm.__main__ import main as train_lm
from train.lm.losses import data_loss, distillation_loss
from train.sdsat import losses as sdsat_losses
from train.sdsat.__main__ import main as train_sdsat
from train.sdsat.insertion import Insertion, isolated_row, mixed_row
from train.sdsat.losses import SdsatObjective, sdsat_loss, weigh

T = 192
ADAPTIVE = 500
CFG = ModelConfig.llama(
    vocab_size=512,
    hidden_size=16,
    num_heads=2,
    intermediate_size=16,
    max_position=256,
    num_layers=1,
    eos_ids=(0,),
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Packed rows of conversations."""
    home = tmp_path_factory.mktemp("chats")
    tokenizer = chats.chat_tokenizer(home / "tokenizer.json")
    records = [chats.conversation(i) for i in range(60)]
    (home / "chats.jsonl").write_text("\n".join(map(json.dumps, records)))
    chat = chats.chat_format(tokenizer, chats.CHATML, longest=T)
    data = DataSection(files=(str(home / "chats.jsonl"),))
    corpus = open_corpus(data, tokenizer, Plain(), None, chats=chat)
    packed = training_rows(corpus, T, seed=0)
    return [packed[i] for i in range(4)]


@pytest.fixture(scope="module")
def params():
    return init_params(CFG, jax.random.key(0))


def batch_of(rows):
    return stack([without_answers(row) for row in rows])


def touched(loss, shape):
    """bool: the places whose hidden states get a gradient."""
    gradient = jax.grad(loss)(jnp.zeros(shape))
    return np.asarray((gradient != 0).any(-1))


@pytest.mark.parametrize("distilled", [False, True])
def test_lm_and_distillation(rows, params, monkeypatch, distilled):
    batch = batch_of(rows)
    probe = {}
    original = lm_losses.outputs

    def outputs(cfg, given, *rest, **options):
        head, hidden = original(cfg, given, *rest, **options)
        return head, hidden + probe["x"] if "x" in probe else hidden

    def loss(x):
        probe["x"] = x
        frozen = jax.tree.map(lambda p: p * 1.1, params)
        make = distillation_loss(CFG, CFG, 0.5, 1.0) if distilled else data_loss(CFG)
        return make(params, frozen, batch)[0]

    monkeypatch.setattr(lm_losses, "outputs", outputs)
    expected = batch["labels"] != IGNORE
    np.testing.assert_array_equal(touched(loss, (*batch["tokens"].shape, 16)), expected)
    answers = np.stack([row[ANSWERS] for row in rows])
    assert expected.sum() == answers.sum()


@pytest.mark.parametrize("name", ["basic", "improved", "isolated"])
def test_sdsat(rows, params, monkeypatch, name):
    insertion = Insertion((ADAPTIVE,) * 4, rate=0.3)
    lay_out = isolated_row if name == "isolated" else mixed_row
    laid_out = [lay_out(insertion, row, i) for i, row in enumerate(rows)]
    batch = batch_of(laid_out)
    objective = SdsatObjective(name, 4, self_share=0.0)
    batch = {k: x[0] for k, x in weigh(objective, {k: x[None] for k, x in batch.items()}).items()}
    probe = {}

    def states(*arguments, **options):
        found = hidden_states(*arguments, **options)
        return found._replace(hidden=found.hidden + probe["x"])

    def loss(x):
        probe["x"] = x
        return sdsat_loss(CFG, objective)(params, {}, batch)[0]

    monkeypatch.setattr(sdsat_losses, "hidden_states", states)
    count = 2 if name == "improved" else 1
    shape = (count * len(rows), batch["tokens"].shape[1], 16)
    found = touched(loss, shape).reshape(len(rows), count, -1)
    trained = batch["labels"] != IGNORE
    if name == "improved":
        np.testing.assert_array_equal(found[:, 0], trained)
        trained = trained & (batch["index"] > 0)
    np.testing.assert_array_equal(found[:, -1], trained)

    # Windows stand where an answer is generated, and nowhere else.
    for row, laid in zip(rows, laid_out, strict=True):
        if name == "isolated":
            used = laid["segments"][T:] > 0
            assert used.any() and row[ANSWERS][laid["sources"][used]].all()
        else:
            assert (laid["index"] > 0).any() and not (laid["index"] > 0)[row[ANSWERS] == 0].any()


@pytest.mark.parametrize("name", ["lm", "basic", "isolated"])
def test_the_routers_loss_has_its_weight_whatever_share_has_labels(rows, name):
    """A step divides by the number of labels, and leaves the mean loss of the routers."""
    plain = dataclasses.replace(CFG, experts=ExpertsConfig(count=4, active=2, size=8))
    params = init_params(plain, jax.random.key(0))
    lay_out = isolated_row if name == "isolated" else mixed_row
    insertion = Insertion((ADAPTIVE,) * 4, rate=0.3)
    batch = batch_of([lay_out(insertion, row, i) for i, row in enumerate(rows)])
    objective = SdsatObjective(name, 4, self_share=0.0)
    everywhere = batch | {"labels": np.abs(batch["labels"]), "ratio": 1.0}

    def gradient(cfg):
        loss = data_loss(cfg) if name == "lm" else sdsat_loss(cfg, objective)

        @jax.jit
        def of_router(batch):  # as a step divides it
            grads, count = jax.grad(lambda p: loss(p, None, batch)[:2], has_aux=True)(params)
            return grads["layers"]["0"]["mlp"]["router"]["weight"] / count

        return of_router

    def added(batch):
        return balanced(batch) - unbalanced(batch)

    unbalanced = gradient(plain)
    balanced = gradient(with_router_loss(plain, 100.0))
    few = np.arange(batch["labels"].shape[1]) % 6 == 0
    sparse = everywhere | {"labels": np.where(few, everywhere["labels"], IGNORE)}
    want = added(everywhere)
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(added(sparse), want, rtol=1e-3, atol=1e-4)


def test_head(rows, params, monkeypatch):
    batch = batch_of(rows)
    head = HeadConfig.of(CFG, None, own_embedding=False, layer_ids=(0,))
    head_params = init_params(head, jax.random.key(1))
    objective = HeadObjective(steps=3)
    original = head_losses.draft_steps

    def loss(x):
        def steps(*arguments, **options):
            for k, hidden in enumerate(original(*arguments, **options)):
                yield hidden + x[k]

        monkeypatch.setattr(head_losses, "draft_steps", steps)
        return head_loss(CFG, head, objective)(head_params, params, batch)[0]

    found = touched(loss, (3, *batch["tokens"].shape, 16))
    answers = np.stack([row[ANSWERS] for row in rows])
    for k in range(1, 4):
        np.testing.assert_array_equal(found[k - 1], labels_of_step(batch, k) != IGNORE)
        for row, place in np.argwhere(found[k - 1]):
            assert answers[row, place + 1 + k]  # the token that step k drafts
    # The first draft of an answer starts at its prompt's last token, which is one place behind.
    first_tokens = np.argwhere(np.diff(answers, axis=1, prepend=0) == 1)
    assert len(first_tokens)
    for row, place in first_tokens:
        assert found[0][row, place - 2] and found[0][row, place - 1]


def check_rounded_alike(a, b):
    """Equal within four units in the last place of the largest number."""
    np.testing.assert_allclose(a, b, rtol=0, atol=4 * np.finfo(np.float32).eps * np.abs(b).max())


def alone(row):
    """(where a conversation of a packed row stands, a row of it alone), for each."""
    assert row["segments"].max() > 1
    for segment in range(1, row["segments"].max() + 1):
        here = row["segments"] == segment
        count = here.sum()
        found = {k: np.zeros((1, T), np.int32) for k in ("tokens", "positions", "segments")}
        found["labels"] = np.full((1, T), IGNORE, np.int32)
        for name, x in found.items():
            x[0, :count] = 1 if name == "segments" else row[name][here]
        yield here, found


def test_a_chat_alone_is_the_chat_in_a_packed_row(rows, params):
    """Its hidden states, and so each of its losses, but for the order of sums over keys."""
    run = jax.jit(lambda *arguments: hidden_states(CFG, params, *arguments).hidden)
    row = rows[0]
    packed = np.asarray(run(*(row[k][None] for k in ("tokens", "positions", "segments"))))[0]
    for here, found in alone(row):
        arguments = (found[k] for k in ("tokens", "positions", "segments"))
        hidden = np.asarray(run(*arguments))[0, : here.sum()]
        check_rounded_alike(hidden, packed[here])


def test_drafts_of_a_chat_alone_are_those_in_a_packed_row(rows, params):
    """In each step, wherever a token of an answer is drafted, but for the order of sums."""
    head = HeadConfig.of(CFG, None, own_embedding=False, layer_ids=(0,))
    cfg, head_params = share_embedding(head, init_params(head, jax.random.key(1)), params["embed"])
    objective = HeadObjective(steps=3)

    @jax.jit
    def run(batch):
        states = hidden_states(CFG, params, *row_arguments(batch), aux_layers=head.layer_ids)
        return list(head_losses.draft_steps(cfg, head_params, batch, states.aux, objective))

    batch = batch_of(rows[:1])
    packed = run(batch)
    for here, found in alone(rows[0]):
        for k, drafts in enumerate(run(found), start=1):
            trained = np.asarray(labels_of_step(found, k))[0] != IGNORE
            assert trained.any()
            places = np.flatnonzero(here)[trained[: here.sum()]]
            check_rounded_alike(drafts[0][trained], packed[k - 1][0][places])


def objective_of(name, params):
    """(loss, its params, the frozen ones, what weighs its batches)."""
    if name == "lm":
        return data_loss(CFG), params, {}, None
    if name == "distillation":
        return distillation_loss(CFG, CFG, 0.5, 1.0), params, params, None
    if name == "head":
        head = HeadConfig.of(CFG, None, own_embedding=False, layer_ids=(0,))
        head_params = init_params(head, jax.random.key(1))
        return head_loss(CFG, head, HeadObjective(steps=3)), head_params, params, None
    chosen = SdsatObjective(name, 4, self_share=0.5)
    return sdsat_loss(CFG, chosen), params, {}, functools.partial(weigh, chosen)


@pytest.mark.parametrize(
    "objective", ["lm", "distillation", "head", "basic", "improved", "isolated"]
)
def test_accumulated_batches_of_unequal_counts_are_one_large_batch(rows, params, objective):
    emptier = {k: x.copy() for k, x in rows[1].items()}
    emptier["labels"][20:] = IGNORE  # few of its tokens are trained
    pair = [rows[0], emptier]
    loss, trained, frozen, weigh_batches = objective_of(objective, params)
    if weigh_batches is not None:
        insertion = Insertion((ADAPTIVE,) * 4, rate=0.3)
        lay_out = isolated_row if objective == "isolated" else mixed_row
        pair = [lay_out(insertion, row, i) for i, row in enumerate(pair)]
    batch = batch_of(pair)
    results = []
    for shape in ((2, 1), (1, 2)):
        batches = {k: x.reshape(*shape, *x.shape[1:]) for k, x in batch.items()}
        optimizer = optax.sgd(1.0)
        copied = jax.tree.map(jnp.copy, trained)
        step = make_step(loss, optimizer, weigh_batches)
        new, _, mean, *_ = step(copied, optimizer.init(trained), frozen, batches)
        results.append((new, mean))
    assert results[0][1] == pytest.approx(float(results[1][1]), rel=1e-5)
    for one, other in zip(*map(jax.tree.leaves, (results[0][0], results[1][0])), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


SHORT = (
    *("data.seq_len=160", "optim.total_steps=2", "optim.batch_size=2", "optim.accumulate=1"),
    *("run.eval_every=2", "run.eval_batches=1", "run.checkpoint_every=2", "run.keep=1"),
)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["head", "sdsat", "lm"])
def test_the_shipped_configs_train_on_answers(program, tmp_path, capsys):
    """With a tiny target in place of SmolLM2: evaluations decode, and the next command is named."""
    home = tmp_path / "target"
    home.mkdir()
    tokenizer = chats.chat_tokenizer(home / "tokenizer.json")
    save_checkpoint(home, tokenizer, max_position=512, num_layers=4)
    settings = {"eos_token": "<|im_end|>", "chat_template": chats.CHATML}
    (home / "tokenizer_config.json").write_text(json.dumps(settings))
    lines = map(json.dumps, map(chats.conversation, range(60)))
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))
    own = {
        "head": (train_head, "head", [f"model.init_from={home}", "head.draft_vocab=0"]),
        "sdsat": (train_sdsat, "sdsat", [f"model.init_from={home}", "model.lora_rank=4"]),
        "lm": (
            train_lm,
            "distill",
            [f"distill.teacher={home}", f"tokenizer.path={home / 'tokenizer.json'}"],
        ),
    }
    main, section, sizes = own[program]
    decoding = (f"{section}.decode_prompts=2", f"{section}.decode_tokens=6")
    places = (f'data.files=["{tmp_path / "answers.jsonl"}"]', f"run.dir={tmp_path / 'run'}")
    config = {"head": "chat_head", "sdsat": "chat_sdsat", "lm": "chat_draft"}[program]
    words = overrides(*SHORT, *sizes, *decoding, *places)
    assert main([str(ROOT / "configs" / f"{config}.toml"), *words]) == 0
    printed = capsys.readouterr()
    assert "next: python -m infer.bench" in printed.out
    # All are conversations; those much like a held-out one are left out.
    counts = re.findall(r"^(?:training|held out): (\d+) documents", printed.err, re.MULTILINE)
    left = sum(map(int, counts))
    assert 2 < left <= 60 and f"conversations among them: {left}" in printed.err
    (evaluated,) = [record for record in logged(tmp_path / "run") if "valid_loss" in record]
    assert evaluated["valid_decode_tokens_per_pass"] >= 1
