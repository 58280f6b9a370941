"""``mesh.model``: layers that are split over devices train as one device does."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint import StandardCheckpointer
from safetensors.numpy import load_file

from support.training import (
    ROOT,
    TINY_LM,
    TINY_SDSAT,
    head_arguments,
    overrides,
    repeatable,
    save_checkpoint,
    small_tokenizer,
)
from train.head.__main__ import main as train_head
from train.lm.__main__ import main as train_lm
from train.sdsat.__main__ import main as train_sdsat

HERE = Path(__file__).parent
# Large enough to be split, and of fewer key heads than four devices.
SIZES = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 128}
ROWS = {"vocab_size": 401}  # which no devices divide
STEPS = (
    *("optim.batch_size=8", "optim.total_steps=3", "optim.warmup_steps=1", "run.log_every=1"),
    # Adam divides small gradients by themselves, and so makes rounding as large as a step.
    *("optim.epsilon=1e-2", "run.eval_every=3", "run.eval_batches=1"),
)
SDSAT = ("sdsat.decode_prompts=0", "model.lora_rank=8")
PROGRAMS = {"train.lm": train_lm, "train.sdsat": train_sdsat, "train.head": train_head}
CASES = {
    "lm": ("train.lm",),
    "sdsat": ("train.sdsat", "sdsat.loss=isolated"),
    "lora": ("train.sdsat", "model.train=lora", "sdsat.loss=improved"),
    "gated": ("train.sdsat", "model.train=gated-lora"),
    "head": ("train.head", "head.draft_vocab=130", "head.intermediate_size=128"),
}


def arguments(start, case, directory, *settings):
    """The command line of a short run."""
    program, *own = CASES[case]
    settings = (*STEPS, *own, *settings)
    if program == "train.head":
        return head_arguments(start, directory, "head.decode_prompts=0", *settings)
    if program == "train.sdsat":
        settings = (*SDSAT, *settings)
    config = TINY_LM if program == "train.lm" else TINY_SDSAT
    return [config, *overrides(f"model.init_from={start}", f"run.dir={directory}", *settings)]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    home = tmp_path_factory.mktemp("start")
    return save_checkpoint(home, small_tokenizer(home), tie_embeddings=False, **SIZES, **ROWS)


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)  # the configs name the corpus relative to it


def exported(directory):
    """The arrays of a run's export, by file."""
    [file] = (directory / "export").glob("*.safetensors")
    return load_file(file)


def checkpointed(directory):
    """The shapes of the arrays in a run's checkpoint, by path."""
    saved = StandardCheckpointer().metadata(directory / "checkpoints/3/arrays")
    leaves = jax.tree_util.tree_leaves_with_path(
        saved.item_metadata.tree, is_leaf=lambda node: hasattr(node, "shape")
    )
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}


def run(start, case, directory, fsdp, model):
    """A run on eight simulated devices."""
    mesh = (f"mesh.fsdp={fsdp}", f"mesh.model={model}")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    command = [sys.executable, "-m", CASES[case][0], *arguments(start, case, directory, *mesh)]
    done = subprocess.run(
        command, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "taken",
    ["isolated-2 or its_part", pytest.param("test", marks=pytest.mark.sweep)],
)
def test_losses_and_gradients_on_eight_devices(taken):
    devices = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "pytest", HERE / "eight_devices_model.py", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "-rf", "-k", taken], env=devices, capture_output=True, text=True, cwd=HERE
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert ("13 passed" if taken == "test" else "4 passed") in done.stdout


EVERY = [(case, fsdp, model) for case in CASES for fsdp, model in ((8, 1), (4, 2), (2, 4), (1, 4))]
TAKEN = [("lm", 2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "fsdp", "model"),
    [*TAKEN, *[pytest.param(*each, marks=pytest.mark.sweep) for each in EVERY]],
)
def test_runs_on_eight_devices_log_and_export_what_one_does(start, tmp_path, case, fsdp, model):
    run(start, case, tmp_path / "many", fsdp, model)
    assert PROGRAMS[CASES[case][0]](arguments(start, case, tmp_path / "one")) == 0
    records = (repeatable(tmp_path / name) for name in ("many", "one"))
    for many, one in zip(*records, strict=True):
        for name in ("loss", "objective", "adaptive_loss", "kl", "grad_norm", "valid_loss"):
            if name in one:
                np.testing.assert_allclose(many[name], one[name], rtol=1e-5, err_msg=name)
    ours, theirs = (exported(tmp_path / name) for name in ("many", "one"))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.shape == theirs[name].shape  # no rows of padding
        np.testing.assert_allclose(array, theirs[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert checkpointed(tmp_path / "many") == checkpointed(tmp_path / "one")
