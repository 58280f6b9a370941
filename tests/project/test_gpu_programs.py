"""What XLA makes of rounds for an H100; needs the wheels of the CUDA plugin, and no GPU.

``SPECJAX_CUDA`` names the directory that holds them. Installed beside the other packages, they
would make JAX look for a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specjax.registry import METHODS

ROOT = Path(__file__).parents[2]
WHEELS = Path(os.environ.get("SPECJAX_CUDA", "no-such-directory"))
pytestmark = [pytest.mark.slow, pytest.mark.gpu_compiler]


@pytest.fixture(scope="session", autouse=True)
def wheels():
    if not (WHEELS / "jax_plugins" / "xla_cuda12").is_dir():
        pytest.skip("needs the CUDA plugin's wheels: CONTRIBUTING says where")


def measured(*argv):
    """The rows of the tool's table, as dicts by column."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(WHEELS), *sys.path[1:]]),
    }
    command = [sys.executable, "docs/tools/measure_gpu_programs.py", *argv]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    head, _, *rows = (line[2:].split(" |") for line in run.stdout.splitlines())
    return [{k.strip(): v.strip() for k, v in zip(head, row, strict=True)} for row in rows]


def check_one_graph(rows):
    for row in rows:
        assert (row["graph"], row["waits"], row["empty conditions"]) == ("one", "0", "0"), row


@pytest.mark.parametrize("part", range(4))
def test_a_round_of_every_method_is_one_graph_and_waits_for_nothing(part):
    names = list(METHODS)[part::4]
    rows = measured(*names, "--layers", "1", "--batch", "1", "--draws", "sampled")
    assert [row["method"] for row in rows] == names
    check_one_graph(rows)
    # Sorting 128,256 tokens would take some forty kernels.
    assert all(int(row["sorts"]) < 10 for row in rows)


@pytest.mark.parametrize("batch", ["1", "8", "32"])
def test_a_layer_takes_as_many_kernels_for_any_number_of_rows(batch):
    options = ("--layers", "3", "--draws", "greedy", "--per-layer")
    (row,) = measured("autoregressive", "--batch", batch, *options)
    check_one_graph([row])
    assert int(row["kernels a layer"]) <= 12
    assert row["cache copies"] == "0"


def test_codes_of_four_bits_are_not_copied():
    """Temporaries of one layer are the dense weights of its products, 235 MB at most at a time."""
    size = ("--layers", "1", "--batch", "8", "--draws", "greedy", "--quantize", "int4")
    (row,) = measured("autoregressive", *size)
    check_one_graph([row])
    assert int(row["temporaries MB"]) < 300


def test_rounds_under_grammars_as_tables_are_one_graph():
    size = ("--layers", "1", "--batch", "8", "--draws", "greedy", "--set", "gamma=4")
    check_one_graph(measured("lookup", "--grammars", *size))


def test_rounds_of_a_mixture_are_one_graph():
    """Blocks of the same expert are a loop that ends on data, and the graph holds it."""
    size = ("--target", "qwen3-30b-a3b", "--layers", "1", "--batch", "8", "--draws", "greedy")
    check_one_graph(measured("autoregressive", *size))


def test_greedy_rounds_are_one_graph_too():
    greedy = ("--layers", "1", "--batch", "8", "--draws", "greedy")
    (speculative, beam) = measured("speculative", "beam", *greedy)
    # Passes of several widths are loops of one iteration.
    (lookup,) = measured("lookup", *greedy, "--pass-width", "1")
    check_one_graph([speculative, beam, lookup])
    # Beams change places, and their caches move in place.
    assert {row["cache copies"] for row in (speculative, beam, lookup)} == {"0"}


def test_a_step_on_long_rows_waits_for_nothing():
    """Attention is one kernel forward and two backward in each layer, not a loop over blocks."""
    (row,) = measured("--training", "4096", "--layers", "2")
    assert row["waits"] == "0"
    assert int(row["kernels"]) < 1000


def test_a_pass_over_prompts_waits_for_nothing():
    for row in measured("--prefill", "--batch", "1", "8", "--capacity", "16384"):
        assert row["waits"] == "0"
        assert int(row["kernels"]) < 40
