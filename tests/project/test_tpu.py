"""What the TPU compiler expects a round to cost; needs libtpu, and no TPU.

``SPECJAX_LIBTPU`` names the directory that holds it. Installed beside the other packages, libtpu
would make JAX look for a TPU.
"""

import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALONE = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "XLA_FLAGS": "",
}
PATH = [os.environ.get("SPECJAX_LIBTPU", ""), *sys.path[1:]]
pytestmark = [pytest.mark.slow, pytest.mark.tpu]


def measured(tool, *argv):
    """The rows of the table that a tool prints, as dicts by column."""
    if PathFinder.find_spec("libtpu", PATH) is None:
        pytest.skip("needs libtpu: CONTRIBUTING says where")
    command = [sys.executable, f"docs/tools/{tool}.py", *argv]
    environment = os.environ | ALONE | {"PYTHONPATH": os.pathsep.join([str(ROOT), *PATH])}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    head, _, *rows = (line[2:].split(" |") for line in run.stdout.splitlines())
    return [{k.strip(): v.strip() for k, v in zip(head, row, strict=True)} for row in rows]


@pytest.mark.parametrize("topology", ["v6e:2x2", "v5e:2x4"])
def test_one_row_streams_the_weights(topology):
    """With passes padded to eight tokens. Without padding the limit must be missed."""

    def over_the_limit(*more):
        asked = ("autoregressive", "--batch", "1", "--layers", "2", "--topology", topology)
        return float(measured("measure_tpu", *asked, *more)[0]["over the limit"])

    assert over_the_limit() < 1.2
    assert over_the_limit("--pass-width", "1") > 2


@pytest.mark.sweep
def test_a_piece_of_a_long_prompt_costs_little_more_than_its_products():
    """At most 1.5 times them. Our blocks in plain JAX took 2.07."""
    asked = ("--layers", "4", "--batch", "1", "--capacity", "16384", "--topology", "v5e:2x4")
    (row,) = measured("measure_tpu", "--prefill", *asked)
    assert float(row["over them"]) < 1.5


@pytest.mark.sweep
def test_a_head_in_8_bits_drafts_for_a_twentieth_of_a_step():
    rows = measured("measure_head", "--batch", "1", "--quantize", "int8")
    (draft,) = (row for row in rows if row["round"] == "draft step")
    assert float(draft["c"]) < 0.05


@pytest.mark.sweep
def test_attention_kernels_pay_for_the_blocks_that_causal_rows_meet():
    """Cycles relative to the kernel's products at a plain product's rate.

    They are lower than if the kernel visited the blocks that it skips. They are above 1 because the
    matrix unit is twice as wide as a head.
    """
    (forward, backward) = measured(
        "measure_training", "--attention", "--tokens", "16384", "--topology", "v6e:1x1"
    )
    assert [row["blocks"] for row in (forward, backward)] == ["136", "72"]
    assert [row["turns"] for row in (forward, backward)] == ["256", "128"]
    assert 2 < float(forward["over plain products"]) < 3.5
    assert 1.5 < float(backward["over plain products"]) < 2.5
