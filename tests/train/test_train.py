"""train.lm: config errors, losses, schedules, resumption after a kill, exit codes."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax._util.errors import InputError
from specjax.models import ModelConfig, init_params, load_pretrained, num_params
from support.training import ROOT, TINY_LM, TINY_SDSAT, logged, overrides
from train.config import (
    MAY_CHANGE,
    HeadRunConfig,
    LMConfig,
    Optim,
    Run,
    SDSATConfig,
    fixed_settings,
    from_toml,
    require_same,
)
from train.data.packing import IGNORE
from train.engine.batches import text_counts, with_total_steps
from train.engine.directory import lock_directory
from train.engine.loop import make_step
from train.engine.losses import OutputHead, chunked_distillation
from train.engine.optim import make_optimizer, muon_axes, schedule, schedule_warning
from train.lm.__main__ import main
from train.lm.losses import data_loss
from train.lm.training import useful_operations
from train.sdsat.__main__ import main as sdsat


def program(*argv):
    return main([TINY_LM, *map(str, argv)])


def quick(directory, steps=20):
    return overrides(f"run.dir={directory}", f"optim.total_steps={steps}", "run.eval_every=1000")


def losses(directory):
    return [(row["step"], row["loss"]) for row in logged(directory) if "loss" in row]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)  # configs/tiny.toml names the corpus relative to it


# --- configs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optim.lerning_rate=1", "did you mean optim.learning_rate"),
        ("optimm.total_steps=1", "unknown key optimm"),
        ("optim.total_steps=many", "expected int, got str"),
        ("optim.total_steps=0", "from 1 to"),
        ("optim.optimizer=sgd", "adamw, muon"),
        ("distill.alpha=1.5", "from 0 to 1"),
        ("data.corpora=stdlib", "list of strings"),
        ("mesh.topology=v5e", "mesh.topology='v5e': expected KIND:AxB or KIND:AxBxC"),
        ("mesh.topology=v5e:2x0", "expected KIND:AxB or KIND:AxBxC"),
        ("total_steps=3", "section.key=value"),
        ("optim.total_steps", "section.key=value"),
    ],
)
def test_bad_settings_are_named(override, says):
    with pytest.raises(InputError, match=says):
        from_toml(LMConfig, TINY_LM, [override])


def test_overrides_are_toml_values():
    cfg = from_toml(LMConfig, TINY_LM, ["optim.learning_rate=1", 'run.dir="a b"', "run.seed=7"])
    assert (cfg.optim.learning_rate, cfg.run.dir, cfg.run.seed) == (1.0, "a b", 7)


def test_shipped_configs_are_valid():
    for path in sorted((ROOT / "configs").glob("*.toml")):
        kinds = {"sdsat": SDSATConfig, "head": HeadRunConfig}
        kind = path.stem.removeprefix("chat_").partition("_")[0]
        from_toml(kinds.get(kind, LMConfig), path)
        name = kind if kind in kinds else "lm"
        if path.stem.startswith("sdsat_ablation"):
            name = "ablation"
        assert f"python -m train.{name} configs/{path.name}" in path.read_text()


# --- losses, optimizer, schedule -------------------------------------------------------------


@pytest.fixture
def arrays():
    keys = jax.random.split(jax.random.key(0), 5)
    hidden, other = (jax.random.normal(k, (2, 7, 4)) for k in keys[:2])
    head, teacher = (jax.random.normal(k, (11, 4)) for k in keys[2:4])
    labels = jax.random.randint(keys[4], (2, 7), 0, 11).at[0, 3].set(IGNORE)
    return hidden, head, other, teacher, labels


@pytest.mark.parametrize("chunk", [1, 3, 5, 14, 100])
def test_chunked_cross_entropy_equals_plain(arrays, chunk):
    hidden, head, *_, labels = arrays

    def plain(hidden, head):
        log_p = jax.nn.log_softmax(hidden @ head.T)
        chosen = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        return -jnp.sum(jnp.where(labels == IGNORE, 0, chosen))

    def chunked(hidden, head):
        return OutputHead(head).cross_entropy(hidden, labels, chunk)[0]

    np.testing.assert_allclose(chunked(hidden, head), plain(hidden, head), rtol=1e-5)
    for a, b in zip(
        jax.grad(chunked, (0, 1))(hidden, head), jax.grad(plain, (0, 1))(hidden, head), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert OutputHead(head).cross_entropy(hidden, labels, chunk)[1] == 13


def test_distillation_is_the_kl_from_the_teacher(arrays):
    hidden, head, other, teacher, labels = arrays
    log_p, log_q = jax.nn.log_softmax(other @ teacher.T), jax.nn.log_softmax(hidden @ head.T)
    kl = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)[labels != IGNORE].sum()
    nll = OutputHead(head).cross_entropy(hidden, labels)[0]
    models = (OutputHead(head), hidden, OutputHead(teacher), other)
    for alpha in (0.0, 0.3, 1.0):
        got, count, on_data = chunked_distillation(*models, labels, alpha, chunk=4)
        np.testing.assert_allclose(on_data, nll, rtol=1e-5)
        np.testing.assert_allclose(got, alpha * kl + (1 - alpha) * nll, rtol=1e-5)
        assert count == 13

    def loss(teacher_hidden):
        return chunked_distillation(
            OutputHead(head), hidden, OutputHead(teacher), teacher_hidden, labels
        )[0]

    assert not np.any(jax.grad(loss)(other)), "the teacher gets no gradient"


@pytest.mark.parametrize(("epochs", "steps"), [(0.0, 7), (1.0, 4), (2.5, 8), (0.01, 1)])
def test_epochs_take_the_place_of_steps(epochs, steps):
    data = SimpleNamespace(apart=False, sources=[SimpleNamespace(lengths=np.array([60, 40]))])
    changes = ["data.seq_len=16", "optim.batch_size=2", "optim.total_steps=7"]
    cfg = from_toml(LMConfig, TINY_LM, [*changes, f"optim.num_epochs={epochs}"])
    assert with_total_steps(cfg, data).optim.total_steps == steps


def test_an_epoch_of_conversations_has_every_row():
    """Of 300 tokens one fits a row of 512: a hundred of them are a hundred rows, not 59."""
    data = SimpleNamespace(apart=True, sources=[SimpleNamespace(lengths=np.full(100, 300))])
    changes = ["data.seq_len=512", "optim.batch_size=1", "optim.num_epochs=1"]
    cfg = from_toml(LMConfig, TINY_LM, changes)
    assert with_total_steps(cfg, data).optim.total_steps == 100
    assert text_counts(cfg, data).epoch == 100 * 512


def test_more_epochs_than_can_be_counted_are_refused():
    data = SimpleNamespace(apart=False, sources=[SimpleNamespace(lengths=np.array([60, 40]))])
    cfg = from_toml(LMConfig, TINY_LM, ["optim.num_epochs=1e30"])
    with pytest.raises(InputError, match=r"optim.num_epochs=1e\+30 are more than"):
        with_total_steps(cfg, data)


def params():
    block = {"q": {"weight": jnp.ones((4, 3))}, "norm": {"weight": jnp.ones(3)}}
    return {"embed": jnp.ones((5, 3)), "layers": {"0": block}, "norm": {"weight": jnp.ones(3)}}


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
def test_weight_decay_touches_matrices_only(optimizer):
    optimizer = make_optimizer(Optim(optimizer, warmup_steps=0, weight_decay=0.5))
    zero = jax.tree.map(jnp.zeros_like, params())
    updates, _ = optimizer.update(zero, optimizer.init(params()), params())
    assert (updates["embed"] < 0).all() and (updates["layers"]["0"]["q"]["weight"] < 0).all()
    assert not updates["norm"]["weight"].any()
    assert not updates["layers"]["0"]["norm"]["weight"].any()


def state_bytes(weights, **optim):
    state = jax.eval_shape(make_optimizer(Optim(**optim)).init, weights)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def test_moments_take_the_memory_of_their_dtype():
    weights = {"layers": {"0": {"q": {"weight": jax.ShapeDtypeStruct((256, 512), jnp.float32)}}}}
    entries = 256 * 512
    for optim, wanted in (
        ({}, 8 * entries),
        ({"moments": "bfloat16"}, 6 * entries),
        ({"optimizer": "muon"}, 4 * entries),
        ({"optimizer": "muon", "moments": "bfloat16"}, 2 * entries),
        ({"optimizer": "adafactor"}, 4 * (256 + 512)),
    ):
        assert wanted <= state_bytes(weights, **optim) < wanted + 64, optim


@pytest.mark.parametrize("options", [{"moments": "bfloat16"}, {"optimizer": "adafactor"}])
def test_optimizers_with_smaller_states_descend_as_far_as_adamw(options):
    """On a quadratic large enough to be factored, in the same number of steps."""
    goal = jax.random.normal(jax.random.key(0), (128, 256))

    def end(**optim):
        optimizer = make_optimizer(Optim(learning_rate=0.05, weight_decay=0.0, **optim))
        weights = {"w": jnp.zeros_like(goal)}

        def step(carry, _):
            weights, state = carry
            value, grads = jax.value_and_grad(lambda p: jnp.mean((p["w"] - goal) ** 2))(weights)
            updates, state = optimizer.update(grads, state, weights)
            return (optax.apply_updates(weights, updates), state), value

        return jax.lax.scan(step, (weights, optimizer.init(weights)), length=60)[1]

    losses, adamw = end(**options), end()
    assert losses[0] == adamw[0] and adamw[-1] < 0.5 * adamw[0]
    assert losses[-1] < 1.25 * adamw[-1]


def test_muon_trains_only_the_matrices_of_the_blocks():
    axes = muon_axes(params())
    assert axes["layers"]["0"]["q"]["weight"] is not None
    assert axes["embed"] is None and axes["layers"]["0"]["norm"]["weight"] is None


def test_schedules_where_their_phases_meet():
    cfg = Optim(warmup_steps=10, total_steps=100, decay_fraction=0.2, final_fraction=0.1)
    rate = schedule(cfg, 2.0)
    for step, want in ((0, 0.2), (4, 1), (9, 2), (10, 2), (80, 2), (90, 1.1), (100, 0.2)):
        np.testing.assert_allclose(rate(step), want, rtol=1e-5)
    cosine = schedule(
        Optim(schedule="cosine", warmup_steps=10, total_steps=100, final_fraction=0.1), 2.0
    )
    for step, want in ((0, 0.2), (9, 2), (10, 2), (55, 1.1), (100, 0.2)):
        np.testing.assert_allclose(cosine(step), want, rtol=1e-5)


@pytest.mark.parametrize("name", ["wsd", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 50])
def test_a_schedule_without_much_room_still_ends_at_its_final_rate(name, warmup):
    """Warmup that takes most steps shortens the decay; it does not cut it off."""
    cfg = Optim(schedule=name, warmup_steps=warmup, total_steps=60, final_fraction=0.1)
    rate = schedule(cfg, 2.0)
    np.testing.assert_allclose(rate(max(0, warmup - 1)), 2, rtol=1e-5)
    np.testing.assert_allclose(rate(60), 0.2, rtol=1e-5)
    assert schedule_warning(cfg) is None


@pytest.mark.parametrize(("fraction", "last"), [(0.0, 2.0), (0.01, 1.1), (0.02, 1.1), (0.03, 0.8)])
def test_a_short_decay_lowers_the_rate_of_the_last_step(fraction, last):
    cfg = Optim(warmup_steps=0, total_steps=100, decay_fraction=fraction, final_fraction=0.1)
    np.testing.assert_allclose(schedule(cfg, 2.0)(99), last, rtol=1e-5)


def test_a_schedule_that_never_leaves_warmup_says_so():
    warning = schedule_warning(Optim(warmup_steps=50, total_steps=20))
    assert "optim.warmup_steps=50" in warning and "40%" in warning
    assert schedule_warning(Optim(warmup_steps=50, total_steps=51)) is None


def test_accumulation_equals_one_large_batch():
    def loss(params, frozen, batch):
        real = batch["labels"] != IGNORE
        return jnp.sum((batch["tokens"] * params["w"] - 1) ** 2 * real), real.sum().astype(float)

    tokens = jnp.arange(24.0).reshape(4, 6) / 10
    labels = jnp.where(tokens > 1.1, IGNORE, 1)  # micro-batches with unequal numbers of labels
    step = make_step(loss, optax.sgd(0.1))
    results = []
    for split in (1, 2, 4):
        batch = {"tokens": tokens.reshape(split, -1, 6), "labels": labels.reshape(split, -1, 6)}
        w = {"w": jnp.float32(0.3)}
        results.append(step(w, optax.sgd(0.1).init(w), None, batch)[0]["w"])
    np.testing.assert_allclose(results, results[0], rtol=1e-6)


def test_bits_per_byte_count_the_bytes_of_what_was_evaluated():
    """Two ids of one byte, one of three; a document's first token is not predicted."""
    model = ModelConfig.llama(
        vocab_size=4, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16
    )
    weights = init_params(model, jax.random.key(0))
    tokens = jnp.array([[1, 2, 3, 0]])
    batch = {
        "tokens": tokens,
        "labels": jnp.array([[2, 3, 0, IGNORE]]),
        "segments": jnp.ones_like(tokens),
        "positions": jnp.arange(4)[None],
    }
    byte_counts = np.array([0, 1, 1, 3], np.float32)
    nats, count, figures = data_loss(model, byte_counts=byte_counts)(weights, None, batch)
    bits, in_bytes = figures["bits_per_byte"]
    assert count == 3 and in_bytes == 1 + 3 + 0
    np.testing.assert_allclose(bits, nats / np.log(2), rtol=1e-6)


# --- the program -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run") / "whole"
    os.chdir(ROOT)
    assert program(*quick(directory)) == 0
    return directory


def test_ends_with_a_loadable_directory_and_a_card(uninterrupted):
    cfg, params_read = load_pretrained(uninterrupted / "export")
    assert num_params(cfg) == sum(x.size for x in jax.tree.leaves(params_read))
    card = json.loads((uninterrupted / "export" / "card.json").read_text())
    assert card["step"] == 20 and card["held_out_bits_per_byte"] > 0
    assert card["recipe"]["optim"]["total_steps"] == 20
    assert (uninterrupted / "export" / "tokenizer.json").exists()


@pytest.mark.slow
def test_killed_and_resumed_gives_the_same_losses(uninterrupted, tmp_path):
    directory = tmp_path / "run"
    command = [sys.executable, "-m", "train.lm", TINY_LM, *quick(directory)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    checkpoints = directory / "checkpoints"
    while process.poll() is None and not (checkpoints / "10").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert program(*quick(directory), "--resume") == 0
    assert losses(directory) == losses(uninterrupted)


@pytest.mark.slow
def test_sigterm_saves_and_exits_0(uninterrupted, tmp_path):
    directory = tmp_path / "run"
    command = [sys.executable, "-m", "train.lm", TINY_LM, *quick(directory, 2000)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    metrics = directory / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or not metrics.read_text()):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    reached = losses(directory)[-1][0]
    assert program(*quick(directory, reached + 3), "--resume") == 0
    assert [step for step, _ in losses(directory)] == list(range(1, reached + 4))


def test_a_run_that_diverges_exits_1_and_keeps_its_checkpoint(tmp_path, capsys):
    directory = tmp_path / "run"
    assert program(*quick(directory, 5)) == 0
    broken = ["--set", "optim.learning_rate=1e30", "--set", "optim.warmup_steps=0"]
    capsys.readouterr()
    assert program(*quick(directory, 40), *broken, "--resume") == 1
    err = capsys.readouterr().err.strip().splitlines()
    assert "checkpoint of step" in err[-1] and "Traceback" not in "".join(err)
    assert program(*quick(directory, 8), "--resume") in (0, 1)


def one_error_line(capsys):
    out = capsys.readouterr()
    assert out.out == "" and "Traceback" not in out.err
    return out.err.strip().splitlines()[-1]


def test_bad_input_exits_2_with_one_line(uninterrupted, tmp_path, capsys):
    cases = [
        (quick(uninterrupted), "--resume"),
        ([*quick(uninterrupted, 25), "--set", "run.seed=3", "--resume"], "run.seed"),
        ([*quick(tmp_path / "new"), "--resume"], "no finished checkpoint"),
        ([*quick(tmp_path / "t"), "--set", "distill.teacher=/no/teacher"], "/no/teacher"),
        ([*quick(tmp_path / "u"), "--set", "model.init_from=/no/model"], "/no/model"),
        ([*quick(tmp_path / "v"), "--set", f"model.init_from={'n' * 5000}"], "File name too long"),
        (
            [*quick(tmp_path / "w"), *overrides(f"data.shards={'n' * 5000}", "tokenizer.path=x")],
            "x: cannot be read",
        ),
        ([*quick(tmp_path / "x"), "--set", "mesh.topology=v5e:7x9"], "among 63 devices"),
        (["--set", "optim.batch=3"], "optim.batch_size"),
        (["--set", 'data.files=["/no/such/file"]'], "/no/such/file"),
    ]
    for argv, says in cases:
        assert program(*argv) == 2, argv
        assert says in one_error_line(capsys)


def test_a_resumed_run_refuses_other_settings(uninterrupted, capsys):
    before = (uninterrupted / "metrics.jsonl").read_text()
    for setting, says in (
        ("model.num_heads=4", "model.num_heads is 4, the run began with 2"),
        ("model.rope_theta=5e5", "model.rope_theta is 500000.0, the run began with 10000.0"),
    ):
        assert program(*quick(uninterrupted, 25), *overrides(setting), "--resume") == 2
        assert f"--resume: {says}; set it back" in one_error_line(capsys)
    settings = (f"run.dir={uninterrupted}", f"model.init_from={uninterrupted}/export")
    assert sdsat([TINY_SDSAT, *overrides(*settings), "--resume"]) == 2
    assert "program is 'train.sdsat', the run began with 'train.lm'" in one_error_line(capsys)
    assert (uninterrupted / "metrics.jsonl").read_text() == before


def test_every_setting_is_compared_but_those_that_may_change():
    for cls, path in ((LMConfig, TINY_LM), (SDSATConfig, TINY_SDSAT)):
        began = from_toml(cls, path)
        fixed = fixed_settings("", began, began.model, "")
        for section, values in vars(began).items():
            for key, value in vars(values).items():
                other = dataclasses.replace(values, **{key: another(value)})
                now = dataclasses.replace(began, **{section: other})
                now = fixed_settings("", now, began.model, "")
                if key in MAY_CHANGE.get(section, ()):
                    require_same(fixed, now)
                else:
                    with pytest.raises(InputError, match=rf"--resume: {section}.{key} is "):
                        require_same(fixed, now)


def test_settings_that_may_change_are_keys_of_a_config():
    for section, keys in MAY_CHANGE.items():
        parts = [
            getattr(cfg, section, None) for cfg in (LMConfig(), SDSATConfig(), HeadRunConfig())
        ]
        assert all(any(hasattr(part, key) for part in parts) for key in keys)


def another(value):
    """A value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return value | {"7": 1}
    return (*value, "7") if isinstance(value, tuple) else value + type(value)(1)


@pytest.mark.slow
def test_architecture_and_corpus_are_compared_too(uninterrupted, tmp_path, capsys):
    start, run, text = tmp_path / "start", tmp_path / "run", tmp_path / "a.txt"
    shutil.copytree(uninterrupted / "export", start)
    text.write_text("x = 1\n" * 200)
    argv = [
        *quick(run, 2),
        *overrides(
            f"model.init_from={start}",
            f"tokenizer.path={start}/tokenizer.json",
            "data.corpora=[]",
            f'data.files=["{text}"]',
        ),
    ]
    assert program(*argv) == 0
    capsys.readouterr()
    text.write_text("x = 2\n" * 200)
    assert program(*argv, "--resume") == 2
    assert "corpus.sha256 is " in one_error_line(capsys)
    text.write_text("x = 1\n" * 200)
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert program(*argv, "--resume") == 2
    assert "architecture.norm_eps is 0.001, the run began with 1e-05" in one_error_line(capsys)


def test_the_directory_of_another_running_run_is_refused(uninterrupted, tmp_path, capsys):
    with lock_directory(Run(dir=str(uninterrupted)), resume=True):
        for more in ([], ["--resume"]):
            assert program(*quick(uninterrupted, 25), *more) == 2
            assert f"run.dir {uninterrupted} is being written by process" in one_error_line(capsys)


def test_missing_config_exits_2(capsys):
    assert main(["/no/config.toml"]) == 2
    assert "/no/config.toml" in one_error_line(capsys)


def test_dry_run_prints_one_object_and_writes_nothing(tmp_path, capsys):
    assert program(*quick(tmp_path / "run"), "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["steps"] == 20 and plan["parameters"] > 0
    assert list(tmp_path.iterdir()) == []


def test_the_dry_run_counts_what_each_device_holds(tmp_path, capsys):
    sizes = "model.hidden_size=256", "optim.batch_size=8", "optim.accumulate=1"
    settings = overrides("mesh.devices=8", *sizes)
    plans = []
    for fsdp in (1, 4):
        argv = [*quick(tmp_path / "run"), *settings, *overrides(f"mesh.fsdp={fsdp}")]
        assert program(*argv, "--dry-run", "--json") == 0
        plans.append(json.loads(capsys.readouterr().out))
    whole, shared = (plan["state_megabytes_per_device"] for plan in plans)
    assert whole == plans[0]["state_megabytes"] and plans[0]["devices"] == 8
    assert shared == pytest.approx(whole / 4, rel=0.05)  # norms are not shared
    split = overrides("mesh.fsdp=2", "mesh.model=2")
    assert program(*argv, *split, "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["state_megabytes_per_device"] == pytest.approx(shared, rel=0.05)

    assert program(*argv, *overrides("optim.batch_size=6"), "--dry-run") == 2
    assert "optim.batch_size=6 rows do not divide among 8 devices" in one_error_line(capsys)
    assert program(*argv, *overrides("mesh.fsdp=3"), "--dry-run") == 2
    assert "mesh.fsdp=3 does not divide the 8 devices" in one_error_line(capsys)


def test_distillation_runs_from_a_teacher(uninterrupted, tmp_path, capsys):
    teacher = uninterrupted / "export"
    shared = (f"distill.teacher={teacher}", f"tokenizer.path={teacher}/tokenizer.json")
    argv = [*quick(tmp_path / "draft", 4), *overrides(*shared), "--json"]
    assert program(*argv) == 0
    assert json.loads(capsys.readouterr().out)["finished"] is True


@pytest.mark.parametrize(
    ("setting", "near"), [("remat=true", 1e-6), ("compute_dtype=bfloat16", 1e-2)]
)
def test_remat_and_bfloat16_give_nearly_the_same_losses(uninterrupted, tmp_path, setting, near):
    assert program(*quick(tmp_path / "run", 4), *overrides(f"model.{setting}")) == 0
    changed, plain = losses(tmp_path / "run"), losses(uninterrupted)[:4]
    np.testing.assert_allclose(changed, plain, rtol=near)
    assert "remat" in setting or changed != plain


def test_operations_of_a_step_are_those_of_model_and_teacher(uninterrupted):
    teacher = uninterrupted / "export"
    model, _ = load_pretrained(teacher)
    plain = from_toml(LMConfig, TINY_LM, ["data.seq_len=32"])
    taught = from_toml(LMConfig, TINY_LM, ["data.seq_len=32", f"distill.teacher={teacher}"])
    pairs = 32 * 32 / 2 * model.num_heads * model.head_dim * model.num_layers
    forward = 2 * num_params(model) + 4 * pairs / 32
    assert useful_operations(plain, model) == pytest.approx(3 * forward)
    assert useful_operations(taught, model) == pytest.approx(4 * forward)
