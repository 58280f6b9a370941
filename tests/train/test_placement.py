"""The shardings of a step. Tests that need several devices run in a process that has eight."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = (HERE / "eight_devices_steps.py", HERE / "eight_devices_sequence.py")


@pytest.mark.slow
def test_steps_on_eight_devices():
    devices = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "pytest", *CASES, "-p", "no:xdist", "-rf"]
    done = subprocess.run(command, env=devices, capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "15 passed" in done.stdout
