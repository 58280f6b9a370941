"""Runs that are killed at random moments end with the weights of runs that were not."""

import pytest

from support.tools import load

kills = load("measure_kills")


@pytest.mark.slow
def test_one_kill_in_each_phase_changes_nothing(tmp_path):
    """The tool does so twenty times for each program."""
    steps = {"optim__total_steps": "30", "run__checkpoint_every": "3"}
    report = kills.measure("train.lm", tmp_path, len(kills.PHASES), **steps)
    assert report["kills"] == dict.fromkeys(kills.PHASES, 1)
    assert report["weights_equal"] and report["metrics_equal"]
