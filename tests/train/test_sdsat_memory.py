"""train.sdsat --dry-run: a step's memory by hand, by the compiler, and as measured."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from specjax._util.errors import InputError
from specjax._util.files import write_text
from specjax.models import ModelConfig, init_params, num_params, save_pretrained
from specjax.models.families import to_hf
from support.training import ROOT, TINY_SDSAT, small_tokenizer
from train.config import MeshSection, SDSATConfig, from_toml
from train.data.tokenizer import EOS_ID
from train.engine.placement import Placement
from train.engine.shares import Shares
from train.sdsat import dryrun, memory, operations
from train.sdsat import training as sdsat
from train.sdsat.memory import GIB
from train.sdsat.prepare import prepare_setup

SEVEN_B = (32000, 4096, 32, 32, 32, 11008)
SEVENTY_B = (32000, 8192, 80, 64, 8, 28672)
MEDIUM = (8192, 512, 4, 8, 8, 1376)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    os.chdir(ROOT)
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def shape(vocab, hidden, layers, heads, kv_heads, inner, **other):
    return ModelConfig.llama(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=inner,
        max_position=16384,
        tie_embeddings=False,
        eos_ids=(EOS_ID,),
        **other,
    )


def directory(path, model, tokenizer):
    """A model's directory without any weight."""
    path.mkdir()
    write_text(path / "config.json", json.dumps(to_hf(model, "float32")))
    write_text(path / "tokenizer.json", tokenizer.to_str())
    return path


def config(path, *settings):
    return from_toml(SDSATConfig, TINY_SDSAT, [f"model.init_from={path}", *settings])


def big(path, model, tokenizer, devices, *settings):
    """The paper's step (4 M tokens in sequences of 16,384) on so many devices."""
    where = directory(path, model, tokenizer)
    return config(
        where,
        "data.seq_len=16384",
        f"optim.batch_size={devices}",
        "model.remat=true",
        f"optim.accumulate={256 // devices}",
        "model.compute_dtype=bfloat16",
        f"mesh.fsdp={devices}",
        "sdsat.decode_prompts=0",
        *settings,
    )


def by_hand(cfg, devices):
    setup = prepare_setup(cfg)
    parts = dryrun.step_parts(cfg, setup, setup.model)
    return memory.estimate(
        setup.model, parts, Shares(cfg.mesh.fsdp), devices, cfg.model.compute_dtype, cfg.model.remat
    )


def test_evaluation_needs_the_state_and_two_whole_models(tmp_path, tokenizer):
    """7B in bfloat16 on 8 devices: 12 / 8 bytes of state a parameter, and two copies of 2 bytes."""
    cfg = big(tmp_path / "7b", shape(*SEVEN_B), tokenizer, 8)
    setup = prepare_setup(cfg)
    parts = dryrun.step_parts(cfg, setup, setup.model)
    size = memory.evaluation(setup.model, parts, Shares(8), "bfloat16")
    np.testing.assert_allclose(size, (12 / 8 + 4) * num_params(setup.model), rtol=1e-3)


@pytest.mark.slow
def test_which_of_the_papers_models_fit_which_devices(tmp_path, tokenizer):
    seven = by_hand(big(tmp_path / "7b", shape(*SEVEN_B), tokenizer, 8), 8)
    count = num_params(shape(*SEVEN_B))
    np.testing.assert_allclose(seven["params"], 4 * count / 8, rtol=0.01)
    np.testing.assert_allclose(seven["optimizer"], 8 * count / 8, rtol=0.01)
    assert 16 * GIB < sum(seven.values()) < 80 * GIB
    seventy = by_hand(big(tmp_path / "70b", shape(*SEVENTY_B), tokenizer, 256), 256)
    assert 16 * GIB < sum(seventy.values()) < 95 * GIB
    improved = big(
        tmp_path / "70b2",
        shape(*SEVENTY_B),
        tokenizer,
        256,
        "sdsat.loss=improved",
        "sdsat.adaptive_targets=data",
    )
    more = by_hand(improved, 256)["activations"] / seventy["activations"]
    assert 1.5 < more < 2  # two sequences against one and its windows


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("model.remat=true", "sdsat.loss=improved")])
def test_estimates_are_within_a_fifth_of_the_measured_step(tmp_path, tokenizer, settings):
    where = directory(tmp_path / "medium", shape(*MEDIUM), tokenizer)
    cfg = config(where, "data.seq_len=128", "sdsat.decode_prompts=0", *settings)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "measured_step.py")],
        input=json.dumps(cfg, default=vars),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    bytes_of = json.loads(done.stdout.splitlines()[-1])
    assert abs(bytes_of["predicted"] / bytes_of["measured"] - 1) < 0.2, bytes_of
    assert abs(bytes_of["by_hand"] / bytes_of["measured"] - 1) < 0.3, bytes_of


@pytest.mark.slow
def test_deep_models_are_extrapolated_from_shallow_ones(tmp_path, tokenizer):
    model = shape(400, 64, 9, 4, 4, 128)
    cfg = config(directory(tmp_path / "deep", model, tokenizer), "sdsat.decode_prompts=0")
    setup = prepare_setup(cfg)

    def compile_at(model):
        parts = dryrun.step_parts(cfg, setup, model)
        return memory.compile_step(parts, Placement(), model.num_layers)

    extended, whole = memory.compile_deep(setup.model, compile_at), compile_at(setup.model)
    assert extended.layers == (2, 3) and whole.layers == (9,)
    np.testing.assert_allclose(extended.arguments, whole.arguments, rtol=1e-3)
    np.testing.assert_allclose(extended.total, whole.total, rtol=0.1)


def test_layers_whose_windows_alternate_are_extrapolated_as_groups():
    sliding = (True, True, False) * 6
    model = shape(400, 64, 18, 4, 4, 128, sliding_window=8, sliding_layers=sliding)
    seen = []

    def compile_at(model):
        seen.append(model.windows)
        return memory.Compiled(10 * model.num_layers, 5, 1, (model.num_layers,))

    extended = memory.compile_deep(model, compile_at)
    assert seen == [(8, 8, None) * 2, (8, 8, None) * 3]
    assert (extended.arguments, extended.temporaries, extended.layers) == (180, 5, (6, 9))
    assert memory.compile_deep(model, compile_at, scan=True).layers == (18,)


def test_a_dry_run_tells_the_memory_and_whether_it_fits(tmp_path, tokenizer):
    model = shape(400, 16, 1, 2, 2, 24)
    cfg = config(directory(tmp_path / "tiny", model, tokenizer), "mesh.memory_gib=0.0001")
    needs = dryrun.needed_memory(cfg, prepare_setup(cfg))
    assert needs["devices"] == 1 and needs["compiled_for"] == jax.devices()[0].device_kind
    assert needs["gib_compiled"] > 0.0001 and not needs["fits"]
    parts = needs["gib_compiled_parts"].values()
    np.testing.assert_allclose(sum(parts), needs["gib_compiled"], atol=2e-3)
    assert "more devices" in needs["takes_less"]
    roomy = dryrun.needed_memory(dataclasses.replace(cfg, mesh=MeshSection()), prepare_setup(cfg))
    assert "takes_less" not in roomy


@pytest.mark.slow
def test_settings_that_should_take_less_memory_do(tmp_path, tokenizer):
    """Each alone lowers the compiler's count, or the table's if the compiler counts too little."""
    where = directory(tmp_path / "model", model := shape(2048, 256, 4, 4, 4, 512), tokenizer)
    settings = ["data.seq_len=128", "sdsat.loss=improved", "sdsat.adaptive_targets=data"]
    settings += ["sdsat.decode_prompts=0", "optim.batch_size=4"]

    def taken(*more):
        cfg = config(where, *settings, *more)
        needs = dryrun.needed_memory(cfg, prepare_setup(cfg))
        return needs["gib_compiled"], needs["gib_by_hand"]["total"]

    whole = taken()
    ways = dryrun.lighter(config(where, *settings), model, 1)
    assert len(ways) == 9 and ways.pop() == "more devices"
    for way in ways:
        name = way.partition(" ")[0]
        more = ["optim.accumulate=4"] if " " in way else []
        less = taken(name, *more)
        assert less[0] < whole[0] or less[1] < whole[1], (way, less, whole)


def test_settings_in_use_are_not_suggested(tmp_path, tokenizer):
    model = shape(400, 16, 6, 2, 2, 24)
    where = directory(tmp_path / "tiny", model, tokenizer)
    settings = ["model.compute_dtype=bfloat16", "model.remat=true", "optim.optimizer=adafactor"]
    cfg = config(where, *settings, "mesh.fsdp=4", "optim.batch_size=4")
    assert dryrun.lighter(cfg, model, 4) == [
        "model.scan=true",
        'model.train="gated-lora"',
        "more devices",
    ]


def test_hours_are_the_operations_at_half_of_the_peak(tmp_path, tokenizer):
    where = directory(tmp_path / "tiny", shape(400, 16, 1, 2, 2, 24), tokenizer)
    settings = ["optim.total_steps=1_000_000_000", "optim.batch_size=2", "optim.accumulate=3"]
    cfg = config(where, *settings)
    model = prepare_setup(cfg).model
    tokens = 6e9 * cfg.data.seq_len
    wanted = tokens * operations.useful_operations(cfg, model) / (8 * 459e12 / 2) / 3600
    hours = operations.run_hours(cfg, model, "TPU v5", 8)
    np.testing.assert_allclose(hours["hours_at_half_the_peak"], wanted, atol=0.01)
    assert not operations.run_hours(cfg, model, "cpu", 8)


@pytest.mark.slow
def test_a_row_that_devices_share_takes_less_of_each(tmp_path, tokenizer):
    where = directory(tmp_path / "model", shape(400, 64, 1, 4, 4, 128), tokenizer)
    settings = ["data.seq_len=128", "optim.batch_size=1", "sdsat.decode_prompts=0"]

    def needs(*more):
        cfg = config(where, *settings, *more)
        return dryrun.needed_memory(cfg, prepare_setup(cfg))

    one = needs()
    for axis in ("sequence", "model"):
        two = needs("mesh.devices=2", f"mesh.{axis}=2")
        assert (one["devices"], two["devices"]) == (1, 2)
        for table in ("gib_compiled", "gib_by_hand"):
            taken = [x["total"] if table == "gib_by_hand" else x for x in (one[table], two[table])]
            assert taken[1] < 0.8 * taken[0], (axis, table)


@pytest.mark.slow
def test_other_devices_are_simulated_and_share_the_state(tmp_path, tokenizer):
    model = shape(32768, 512, 1, 4, 4, 512)
    where = directory(tmp_path / "model", model, tokenizer)
    cfg = config(where, "mesh.devices=8", "mesh.fsdp=8", "optim.batch_size=8")
    needs = dryrun.needed_memory(cfg, prepare_setup(cfg))
    assert needs["compiled_for"] == dryrun.SIMULATED and needs["devices"] == 8
    arguments = needs["gib_compiled_parts"]["arguments"]
    np.testing.assert_allclose(arguments, 12 * num_params(model) / 8 / GIB, rtol=0.1)


def test_missing_devices_are_one_line(tmp_path, tokenizer):
    model = shape(400, 16, 1, 2, 2, 24)
    where = directory(tmp_path / "tiny", model, tokenizer)
    cfg = config(where, "mesh.devices=3", f"run.dir={tmp_path / 'run'}")
    with pytest.raises(InputError, match=r"mesh.devices=3, but the run has 1 devices"):
        sdsat.main(cfg, resume=False, dry_run=False)
    with pytest.raises(InputError, match=r"mesh.topology='v5e': expected KIND:AxB"):
        config(where, "mesh.topology=v5e")
    cfg = config(where, "mesh.devices=3")
    with pytest.raises(InputError, match=r"batch_size=4 rows do not divide among 3 devices"):
        dryrun.needed_memory(cfg, prepare_setup(cfg))


def test_a_tuned_model_is_planned_as_it_is_trained(tmp_path, tokenizer):
    """The planned shapes and the real arrays have the same leaves."""
    model = shape(tokenizer.get_vocab_size(), 16, 1, 2, 2, 24)
    where = directory(tmp_path / "tiny", model, tokenizer)
    save_pretrained(where, model, init_params(model, jax.random.key(0)), tokenizer.to_str())
    for part in ("full", "lora"):
        cfg = config(where, f"model.train={part}")
        setup = prepare_setup(cfg)
        parts = dryrun.step_parts(cfg, setup, setup.model)
        real = setup.tuning.split(sdsat.first_params(setup))
        for planned, there in zip((parts.trainable, parts.frozen), real, strict=True):
            shapes = jax.tree.map(lambda x: (x.shape, str(x.dtype)), planned)
            assert shapes == jax.tree.map(lambda x: (x.shape, str(x.dtype)), there)
