"""Every method gives the tokens and counters stored in tests/golden/methods.json."""

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
    """Batches of four. Methods without a draft model share test_decode's compiled programs."""
    known = json.loads(golden.FILE.read_text())
    for mode in golden.SAMPLINGS:
        assert golden.run(name, mode, 4, models()) == known[f"{name} {mode}"], mode
