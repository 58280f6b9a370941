"""What every method writes and counts stays as it was: tests/golden/methods.json."""

import functools
import json

import pytest

import specjax as sj
from golden import methods as golden

FAST = ("speculative", "specinfer", "mtad", "sdsat")
models = functools.cache(golden.models)


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in sj.methods()]
)
def test_tokens_and_counters(name):
    """In batches of four: without a draft model, the programs are those of test_decode."""
    known = json.loads(golden.FILE.read_text())
    for mode in golden.SAMPLINGS:
        assert golden.run(name, mode, 4, models()) == known[f"{name} {mode}"], mode
