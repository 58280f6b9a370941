"""Heads of zeros: the same model for more devices."""

import os
import re
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.convert import main as convert
from specjax._util.errors import ModelError
from specjax.models import (
    ModelConfig,
    hidden_states,
    init_params,
    load_pretrained,
    save_pretrained,
)
from specjax.models.padded_heads import pad_heads
from specjax.models.sharding import split_config
from support.training import ROOT

TOKENS = jnp.arange(1, 13)[None]
SIZES = {"vocab_size": 23, "hidden_size": 20, "num_layers": 2, "intermediate_size": 24}


def model(heads, kv_heads, **other):
    """A model whose biases and weights are all random."""
    cfg = ModelConfig.llama(**SIZES, num_heads=heads, num_kv_heads=kv_heads, head_dim=4, **other)
    params = init_params(cfg, jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return cfg, tree.unflatten(noisy)


def states(cfg, params):
    positions = jnp.arange(TOKENS.shape[1])[None]
    return hidden_states(cfg, params, TOKENS, positions, jnp.ones_like(TOKENS)).hidden


@pytest.mark.parametrize(
    ("heads", "kv_heads", "wanted", "other"),
    [(5, 5, 8, {}), (6, 3, 8, {"qkv_bias": True}), (3, 1, 12, {"qk_norm": "head"})],
)
def test_more_heads_change_no_output(heads, kv_heads, wanted, other):
    cfg, params = model(heads, kv_heads, **other)
    padded, more = pad_heads(cfg, params, wanted)
    assert (padded.num_heads, padded.num_kv_heads) == (wanted, wanted * kv_heads // heads)
    split_config(padded, 4)  # which it refuses for the model as it was
    np.testing.assert_allclose(states(padded, more), states(cfg, params), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "wanted", "other", "says"),
    [
        (5, 5, 4, {}, "4 heads: the model has 5"),
        (6, 2, 8, {}, "choose a multiple of 3"),
        (4, 4, 8, {"alibi": True, "rope": None}, "heads of zeros would change the others"),
        (4, 4, 8, {"qk_norm": "all"}, "heads of zeros would change the others"),
    ],
)
def test_heads_that_cannot_be_added_are_refused(heads, kv_heads, wanted, other, says):
    with pytest.raises(ModelError, match=re.escape(says)):
        pad_heads(*model(heads, kv_heads, **other), wanted)


def test_convert_writes_a_directory_with_more_heads(tmp_path, capsys):
    cfg, params = model(5, 5)
    save_pretrained(tmp_path / "small", cfg, params, dtype="float16")
    command = [str(tmp_path / "small"), "--heads", "8"]
    assert convert([*command, "--out", str(tmp_path / "large")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "large" / "model.safetensors")
    large = load_pretrained(tmp_path / "large")
    small = load_pretrained(tmp_path / "small")
    np.testing.assert_allclose(states(*large), states(*small), rtol=1e-5, atol=1e-5)
    for wrong, says in (
        ([*command, "--out", str(tmp_path / "large")], "exists already: give --overwrite"),
        ([*command, "--out", str(tmp_path / "small")], "would replace the checkpoint itself"),
        ([str(tmp_path / "small"), "--heads", "3", "--out", str(tmp_path / "x")], "3 heads"),
    ):
        assert convert(wrong) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert says in line


@pytest.mark.slow
@pytest.mark.sweep
def test_the_commands_of_the_page_split_the_demo(tmp_path):
    """Those of docs/devices.md, as printed; the rows of the last two have the same tokens."""
    page = (ROOT / "docs" / "devices.md").read_text()
    block = page.partition("## Try a mesh")[2].partition("```bash\n")[2].partition("```")[0]
    words = [shlex.split(line, comments=True) for line in block.replace("\\\n", "").splitlines()]
    rows = []
    for line in filter(None, words):
        settings = dict(word.split("=", 1) for word in line if re.match(r"[A-Z_]+=", word))
        command = [sys.executable if word == "python" else word for word in line]
        done = subprocess.run(
            command[len(settings) :],
            env=os.environ | settings | {"PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        rows.append(done.stdout)
    assert len(rows) == 3 and rows[1] == rows[2]
