"""Every method gives the tokens and counters stored in tests/golden/methods.json."""

import dataclasses
import functools
import json

import jax
import pytest

import specjax as sj
from golden import methods as golden
from specjax._util import platform
from specjax.models.attention import decode_kernel

FAST = ("speculative", "specinfer", "mtad", "sdsat")
models = functools.cache(golden.models)


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in sj.methods()]
)
def test_tokens_and_counters(name):
    """Batches of four. Methods without a draft model share test_decode's compiled programs."""
    known = json.loads(golden.FILE.read_text())
    for mode in golden.modes(name):
        assert golden.run(name, mode, 4, models()) == known[f"{name} {mode}"], mode


@pytest.mark.slow
def test_the_choices_for_a_gpu_give_the_same_tokens(monkeypatch):
    """Its attention kernel, cache writes, search for top-p, and sorts in blocks, on a CPU."""
    cpu = platform.CPU
    like_gpu = dataclasses.replace(
        platform.GPU, dtype=cpu.dtype, pass_width=cpu.pass_width, prefill_chunk=cpu.prefill_chunk
    )
    known = json.loads(golden.FILE.read_text())
    monkeypatch.setitem(platform.PLATFORMS, "cpu", like_gpu)
    interpreted = functools.partial(decode_kernel.decode_attention, interpret=True)
    monkeypatch.setattr(decode_kernel, "decode_attention", interpreted)
    jax.clear_caches()
    try:
        for name in ("speculative", "specinfer", "mtad", "beam", "suffix"):
            for mode in golden.SAMPLINGS:
                assert golden.run(name, mode, 4, models()) == known[f"{name} {mode}"], (name, mode)
    finally:
        jax.clear_caches()
