"""What the TPU compiler expects a round to cost; needs libtpu, and no TPU.

``SPECJAX_LIBTPU`` names a directory that holds it: beside the packages of the other tests JAX would
look for a TPU.
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


def measured(*argv):
    """The one row that measure_tpu prints, by column."""
    if PathFinder.find_spec("libtpu", PATH) is None:
        pytest.skip("needs libtpu: CONTRIBUTING says where")
    command = [sys.executable, "docs/tools/measure_tpu.py", *argv, "--layers", "2"]
    environment = os.environ | ALONE | {"PYTHONPATH": os.pathsep.join([str(ROOT), *PATH])}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    head, _, row = (line.strip("| \n").split(" | ") for line in run.stdout.splitlines())
    return dict(zip(head, row, strict=True))


@pytest.mark.parametrize("topology", ["v6e:2x2", "v5e:2x4"])
def test_one_row_streams_the_weights(topology):
    """Eight tokens wide; a pass of one token is what it was without, and must not pass."""
    asked = ("autoregressive", "--batch", "1", "--topology", topology)
    assert float(measured(*asked)["over the limit"]) < 1.2
    assert float(measured(*asked, "--pass-width", "1")["over the limit"]) > 2
