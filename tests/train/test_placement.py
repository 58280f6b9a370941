"""The shardings of a step. Tests that need several devices run in a process that has eight."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.training import TINY_LM, TINY_SDSAT, overrides, save_checkpoint, small_tokenizer
from train.engine import placement
from train.lm.__main__ import main as program
from train.sdsat.__main__ import main as train_sdsat

HERE = Path(__file__).parent
EIGHT = ("mesh.devices=8", "optim.batch_size=8")
CASES = (HERE / "eight_devices_steps.py", HERE / "eight_devices_sequence.py")


@pytest.mark.slow
def test_steps_on_eight_devices():
    devices = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "pytest", *CASES, "-p", "no:xdist", "-rf"]
    done = subprocess.run(command, env=devices, capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "17 passed" in done.stdout


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device of a TPU slice, whose hosts have 2 × 2 × 1 chips."""

    coords: tuple[int, int, int]
    device_kind: str = "TPU v5"
    platform: str = "tpu"
    core_on_chip: int = 0
    slice_index: int = 0

    @property
    def process_index(self):
        x, y, z = self.coords
        return x // 2 + 2 * (y // 2) + 4 * z


@pytest.mark.parametrize(
    ("sizes", "group"),
    [
        ({"data": 1, "fsdp": 16, "model": 4}, 4),  # in JAX's own order a group is on two hosts
        ({"data": 2, "fsdp": 16, "model": 2}, 2),
        ({"data": 8, "fsdp": 2, "sequence": 2, "model": 2}, 4),
        ({"data": 2, "fsdp": 32}, 1),  # JAX has no order that keeps the slice's axes whole
    ],
)
def test_devices_that_share_a_row_are_of_one_host(sizes, group):
    chips = [Chip((x, y, z)) for z in range(4) for y in range(4) for x in range(4)]
    array = placement._arrange(sizes, chips)
    assert array.shape == tuple(sizes.values()) and set(array.flat) == set(chips)
    assert not placement._spans_processes(array, group)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("mesh.sequence=3",), "data.seq_len=64 does not divide among mesh.sequence=3 devices"),
        (("mesh.sequence=2",), "mesh.fsdp=1 times mesh.sequence=2 does not divide the 1 devices"),
        (("mesh.sequence=0",), "mesh.sequence=0: expected a whole number"),
        (("mesh.model=0",), "mesh.model=0: expected a whole number"),
        (("mesh.model=2",), "mesh.fsdp=1 times mesh.model=2 does not divide the 1 devices"),
    ],
)
def test_rows_that_cannot_be_split_are_refused_by_name(tmp_path, capsys, settings, says):
    argv = [TINY_LM, *overrides(f"run.dir={tmp_path / 'run'}", *settings)]
    assert program(argv) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("model.num_heads=4", "mesh.model=8"), "mesh.model=8: num_heads=4 cannot be split over"),
        (("model.intermediate_size=66", "mesh.model=4"), "num_heads=2 cannot be split over"),
        (("model.intermediate_size=63", "mesh.model=2"), "intermediate_size=63 cannot be split"),
        (("mesh.model=2", "optim.batch_size=6"), "rows do not divide among 4 groups of 2 devices"),
    ],
)
def test_layers_that_cannot_be_split_are_one_line(tmp_path, capsys, settings, says):
    argv = [TINY_LM, *overrides(f"run.dir={tmp_path / 'run'}", *EIGHT, *settings)]
    assert program([*argv, "--dry-run"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert says in line


def test_appended_tokens_that_cannot_be_split_are_refused(tmp_path, capsys):
    start = save_checkpoint(tmp_path, small_tokenizer(tmp_path))
    settings = (f"model.init_from={start}", "data.seq_len=48", "sdsat.probe_length=5")
    argv = [TINY_SDSAT, *overrides(*settings, "mesh.sequence=2"), "--dry-run"]
    assert train_sdsat(argv) == 2
    assert "mesh.sequence=2 does not divide the 15 tokens appended to a held-out row" in (
        capsys.readouterr().err
    )
