"""train.head: the loss against a slow reference, whole runs, and their exports."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import specjax as sj
from specjax._util.program import INTERRUPTED
from specjax.models import ModelConfig, init_params, load_pretrained, logits_of
from specjax.models.families.head_config import HeadConfig
from specjax.models.forward_pass import hidden_states
from specjax.models.head import draft_logits, share_embedding
from specjax.models.hf.read import load_config
from support import head_steps
from support.training import (
    ROOT,
    logged,
    overrides,
    repeatable,
    save_checkpoint,
    small_tokenizer,
)
from train.config import HeadRunConfig, from_toml
from train.data.loader import make_loader
from train.data.packing import IGNORE
from train.head.__main__ import main as program
from train.head.losses import HeadObjective, draft_steps, head_loss
from train.head.prepare import most_frequent

DEMO = str(ROOT / "configs" / "head_demo.toml")
FULL = str(ROOT / "configs" / "head_llama_8b.toml")
TINY = (
    *("data.corpora=[]", 'data.files=["specjax"]', "data.seq_len=48"),
    *(
        "head.layers=[0]",
        "head.draft_vocab=128",
        "head.num_kv_heads=1",
        "head.intermediate_size=16",
    ),
    *("head.steps=2", "head.decode_prompts=2", "head.decode_tokens=12"),
    *("optim.total_steps=6", "optim.batch_size=4", "optim.accumulate=1", "optim.warmup_steps=1"),
    *("run.log_every=1", "run.eval_every=6", "run.eval_batches=1", "run.checkpoint_every=2"),
    "run.export_dtype=float32",
)


def toy():
    """A target of two layers and a batch of two packed rows, one of them padded."""
    target = ModelConfig.llama(
        vocab_size=23, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24
    )
    params = init_params(target, jax.random.key(0))
    params["embed"] = params["embed"] * 20
    segments = np.array([[1] * 5 + [2] * 7, [1] * 9 + [0] * 3], np.int32)
    positions = np.array([[*range(5), *range(7)], [*range(9), 0, 0, 0]], np.int32)
    tokens = np.random.default_rng(0).integers(0, 23, segments.shape).astype(np.int32)
    labels = np.full_like(tokens, IGNORE)
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    labels[:, :-1] = np.where(same, tokens[:, 1:], IGNORE)
    batch = {"tokens": tokens, "labels": labels, "positions": positions, "segments": segments}
    return target, params, batch


@pytest.mark.parametrize(
    ("ids", "flag", "remat"), [(None, False, False), (np.arange(1, 23, 2), True, True)]
)
def test_the_loss_equals_a_slow_reference(ids, flag, remat):
    target, frozen, batch = toy()
    cfg = HeadConfig.of(
        target,
        ids,
        layer_ids=(0, 1),
        num_kv_heads=1,
        norm_before_residual=flag,
        own_embedding=False,
    )
    params = init_params(cfg, jax.random.key(1))
    params["fc"] = jax.tree.map(lambda x: x * 10, params["fc"])
    objective = HeadObjective(steps=3, decay=0.7, remat=remat)
    result = jax.jit(head_loss(target, cfg, objective))(params, frozen, batch)
    rows = (batch[name] for name in ("tokens", "positions", "segments"))
    hidden, states = hidden_states(target, frozen, *rows, aux_layers=(0, 1))
    logits = logits_of(target, frozen, hidden)
    head = head_steps.Head(cfg, params, frozen["embed"])

    def by_hand(**options):
        given = (batch["tokens"], batch["positions"], batch["segments"], states, logits)
        rows = [
            head_steps.loss(head, *map(np.asarray, row), 3, 0.7, **options)
            for row in zip(*given, strict=True)
        ]
        return [np.sum(part, axis=0) for part in zip(*rows, strict=True)]

    total, count, kl, agreed, places = by_hand()
    np.testing.assert_allclose(result[0], total, rtol=1e-4)
    assert result[1] == count == 3 + 5 + 7
    np.testing.assert_allclose(result[2]["kl"][0], kl, rtol=1e-4)
    np.testing.assert_array_equal(result[2]["agreement"][0], agreed)
    np.testing.assert_array_equal(result[2]["kl"][1], places)
    assert abs(by_hand(fed_back=False)[0] / total - 1) > 1e-3, "the second step must matter"


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("drop", [False, True])
def test_tokens_outside_the_draft_vocabulary_and_means_per_step(drop, per_step):
    """Each option's loss from the default's, by masking labels and dividing steps by hand."""
    target, frozen, batch = toy()
    cfg = HeadConfig.of(target, np.arange(1, 23, 2), layer_ids=(0, 1), own_embedding=False)
    params = init_params(cfg, jax.random.key(1))
    objective = HeadObjective(3, 0.7, drop_outside=drop, mean_per_step=per_step)
    total, count, extras = head_loss(target, cfg, objective)(params, frozen, batch)

    kept = batch
    if drop:
        rows = (batch[name] for name in ("tokens", "positions", "segments"))
        logits = logits_of(target, frozen, hidden_states(target, frozen, *rows).hidden)
        is_drafted = np.asarray(logits.argmax(-1)) % 2 == 1
        assert 0.2 < is_drafted.mean() < 0.8
        # Place i trains step k on what the target says at place i + k; its label stands there.
        kept = batch | {"labels": np.where(is_drafted, batch["labels"], IGNORE)}
    _, _, plain = head_loss(target, cfg, HeadObjective(3, 0.7))(params, frozen, kept)
    (kl, counts), weights = plain["kl"], 0.7 ** np.arange(3)
    np.testing.assert_allclose(extras["kl"][0], kl, rtol=1e-5)
    np.testing.assert_array_equal(extras["kl"][1], counts)
    assert count == 3 + 5 + 7
    mean = (weights * kl / (counts if per_step else count)).sum()
    np.testing.assert_allclose(total / count, mean, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(find_spec("speculators") is None, reason="needs the speculators extra")
def test_means_per_step_are_those_of_speculators():
    """Its own loss of our logits: the same number, and another one without means per step."""
    import torch
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.metrics import compute_metrics

    steps = 3
    decay = 0.7
    target, frozen, batch = toy()
    batch = {name: array[1:] for name, array in batch.items()}  # a document and padding
    batch["labels"][0, 2] = IGNORE  # as a prompt's token
    cfg = HeadConfig.of(target, np.arange(1, 23, 2), layer_ids=(0, 1), own_embedding=False)
    params = init_params(cfg, jax.random.key(1))
    objective = HeadObjective(steps, decay, mean_per_step=True)
    rows = (batch[name] for name in ("tokens", "positions", "segments"))
    hidden, states = hidden_states(target, frozen, *rows, aux_layers=(0, 1))
    teacher = logits_of(target, frozen, hidden)[..., cfg.ids]
    cfg_of_steps, whole = share_embedding(cfg, params, frozen["embed"])
    theirs = 0.0
    for step, states_of_step in enumerate(
        draft_steps(cfg_of_steps, whole, batch, states, objective)
    ):
        # Place i of theirs is the target's place i + 1: their inputs are shifted by one token.
        loss, _ = compute_metrics(
            torch.tensor(np.asarray(draft_logits(cfg_of_steps, whole, states_of_step)))[:, :-1],
            torch.tensor(np.asarray(teacher))[:, 1:],
            torch.tensor(batch["labels"] != IGNORE)[:, 1:],
            None,
            step,
            decay,
            resolve_loss_config("kl_div", "eager"),
        )
        theirs += float(loss)

    total, count, _ = head_loss(target, cfg, objective)(params, frozen, batch)
    np.testing.assert_allclose(total / count, theirs, rtol=1e-4)
    total, count, _ = head_loss(target, cfg, HeadObjective(steps, decay))(params, frozen, batch)
    assert abs(total / count - theirs) > 0.01 * theirs


def test_the_draft_vocabulary_is_the_most_frequent_ids_in_order():
    assert most_frequent(np.array([5, 0, 9, 5, 7]), 3).tolist() == [0, 2, 4]
    assert most_frequent(np.array([1, 1, 1]), 2).tolist() == [0, 1]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A random target's Hugging Face directory."""
    home = tmp_path_factory.mktemp("target")
    return save_checkpoint(home, small_tokenizer(home))


def arguments(start, directory, *settings):
    settings = (f"model.init_from={start}", f"run.dir={directory}", *TINY, *settings)
    return [DEMO, *overrides(*settings)]


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """The directory of a run that nothing interrupted."""
    os.chdir(ROOT)
    directory = tmp_path_factory.mktemp("runs") / "whole"
    assert program(arguments(start, directory)) == 0
    return directory


def test_a_run_learns_and_measures_by_decoding(whole):
    records = [record for record in logged(whole) if "loss" in record]
    assert len(records) == 6 and records[-1]["loss"] < records[0]["loss"]
    assert len(records[0]["kl"]) == len(records[0]["agreement"]) == 2
    measured = next(record for record in logged(whole) if "valid_loss" in record)
    first, second = measured["valid_decode_acceptance"]
    assert 1 >= first >= second >= 0
    assert measured["valid_decode_tokens_per_round"] == pytest.approx(1 + first + second)


def test_killed_and_resumed_gives_the_same_numbers(start, whole, tmp_path, monkeypatch):
    argv = arguments(start, tmp_path / "cut")
    monkeypatch.setattr("train.engine.batches.make_loader", cut_after(5))
    assert program(argv) == INTERRUPTED
    monkeypatch.undo()
    assert program([*argv, "--resume"]) == 0
    assert repeatable(whole) == repeatable(tmp_path / "cut")
    stored = [load_file(run / "export/model.safetensors") for run in (whole, tmp_path / "cut")]
    jax.tree.map(np.testing.assert_array_equal, *stored)


def cut_after(batches):
    """A loader that is killed before its batch of that number."""

    def make(*args, **kw):
        loader = make_loader(*args, **kw)

        class Cut:
            get_state, set_state = loader.get_state, loader.set_state
            taken = 0

            def __next__(self):
                if self.taken == batches:
                    raise KeyboardInterrupt
                self.taken += 1
                return next(loader)

        return Cut()

    return make


def test_the_export_loads_bit_for_bit_and_drafts(start, whole):
    home = whole / "export"
    cfg, params = load_pretrained(home)
    stored = load_file(home / "model.safetensors")
    np.testing.assert_array_equal(params["head"], stored["lm_head.weight"])
    np.testing.assert_array_equal(params["fc"]["weight"], stored["fc.weight"])
    assert stored["d2t"].dtype == np.int64 and stored["t2d"].dtype == bool
    np.testing.assert_array_equal(stored["t2d"].nonzero()[0], np.arange(128) + stored["d2t"])
    assert cfg.verifier == str(start) and cfg.layer_ids == (0,) and not cfg.own_embedding
    out = sj.generate(
        sj.load(start), [[5, 6, 7]], draft=sj.load(home), method="speculative", max_new_tokens=8
    )
    assert out.lengths.tolist() == [8]
    card = json.loads((home / "card.json").read_text())
    assert card["draft_vocabulary"] == 128 and 0 < card["draft_vocabulary_covers"] < 1


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(find_spec("speculators") is None, reason="needs the speculators extra")
def test_speculators_reads_the_exported_config(start, whole):
    """Its own config class reads the file. An installed package must import."""
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    read, layer = Eagle3SpeculatorConfig.from_pretrained(whole / "export"), load_config(start)
    assert read.draft_vocab_size == 128 and read.speculators_config.algorithm == "eagle3"
    assert read.speculators_config.verifier.name_or_path == str(start)
    assert read.eagle_aux_hidden_state_layer_ids == [0] and not read.norm_before_residual
    theirs = read.transformer_layer_config
    assert (theirs.hidden_size, theirs.num_attention_heads) == (layer.hidden_size, layer.num_heads)
    assert (theirs.num_key_value_heads, theirs.intermediate_size) == (1, 16)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [1, 2])
def test_two_devices_give_the_losses_of_one(start, whole, tmp_path, fsdp):
    devices = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-m", "train.head"]
    command += arguments(start, tmp_path / "two", f"mesh.fsdp={fsdp}")
    subprocess.run(command, env=devices, cwd=ROOT, check=True, capture_output=True)
    for two, one in zip(logged(tmp_path / "two"), logged(whole), strict=True):
        for name in ("loss", "kl", "grad_norm", "valid_loss"):
            if name in one:
                np.testing.assert_allclose(two[name], one[name], rtol=2e-4, err_msg=name)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("head.layers=[1]", "head.layers: 1 is not a layer of the target, 0 to 0"),
        ("head.layers=[]", "a target of 1 layers has no layers 2, n // 2 and n - 3"),
        ("head.draft_vocab=100000", "head.draft_vocab=100000 is more than the target's"),
        ("head.num_kv_heads=3", "head.num_kv_heads=3 does not divide the target's 2 heads"),
        ("data.seq_len=128", "longer than the target's context (128) holds"),
        ("model.init_from=''", "model.init_from is empty"),
        ("head.steps=0", "head.steps=0: expected a whole number"),
    ],
)
def test_bad_input_exits_2_with_one_line(start, tmp_path, capsys, setting, says):
    with pytest.raises(SystemExit) as ended:
        sys.exit(program([*arguments(start, tmp_path / "bad", setting), "--dry-run"]))
    output = capsys.readouterr().err
    assert ended.value.code == 2 and len(output.splitlines()) == 1 and says in output


def test_a_head_cannot_be_a_target(start, whole, tmp_path, capsys):
    argv = arguments(start, tmp_path / "bad", f"model.init_from={whole / 'export'}")
    assert program([*argv, "--dry-run"]) == 2
    assert "is a head: name its target" in capsys.readouterr().err


def test_the_dry_run_prints_the_plan(start, tmp_path, capsys):
    assert program([*arguments(start, tmp_path / "dry"), "--dry-run", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["draft_vocabulary"] == 128 and output["tokens_per_step"] == 4 * 48
    assert not (tmp_path / "dry").exists()


def test_shipped_configs_are_read():
    assert from_toml(HeadRunConfig, FULL).head.draft_vocab == 32000
    assert from_toml(HeadRunConfig, DEMO).head.steps > 1
