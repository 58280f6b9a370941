"""Decoding on several devices; eight_devices*.py run in a process that simulates eight."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import specjax as sj
from infer.run import commands as run
from infer.run.plan import make_plan
from specjax.models import fuse, init_cache, init_params, save_pretrained
from specjax.models.placement import param_specs, place
from specjax.models.sharding import split_config
from support.variant_models import build

CASES = [Path(__file__).with_name(f"eight_devices{part}.py") for part in ("", "_vocabulary")]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.sweep)])
def test_eight_devices_give_what_one_gives(which):
    devices = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "pytest", *CASES, "-m", which, "-p", "no:xdist", "-rf"]
    result = subprocess.run(
        command, env=devices, capture_output=True, text=True, cwd=CASES[0].parent
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout


def test_shares_add_up():
    cfg, params, _ = build("biases")
    for count in (2, 4):
        share = split_config(cfg, count)
        specs = param_specs(cfg, fuse(params), count)
        wide = [spec for spec in jax.tree.leaves(specs) if "model" in tuple(spec)]
        # Per layer qkv and gate_up with their biases, out and down; the table has 61 rows.
        assert len(wide) == 2 * 6
        assert share.num_heads * count == cfg.num_heads and share.shards == count
        assert init_cache(share, 1, 8, "float32").k[0].nbytes * count == (
            init_cache(cfg, 1, 8, "float32").k[0].nbytes
        )


def test_placing_reorders_nothing_on_one_device():
    cfg, params, _ = build("tinyllama")
    fused = fuse(params)
    placed = place(cfg, fused, sj.make_mesh(), split=True)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), fused, placed))


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_the_plan_counts_what_each_device_holds(key_heads, tmp_path):
    cfg = sj.models.ModelConfig.llama(
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=key_heads,
        intermediate_size=48,
        max_position=128,
        tie_embeddings=False,
    )
    params = init_params(cfg, jax.random.key(0))
    save_pretrained(tmp_path, cfg, params)
    plan = make_plan({"target": str(tmp_path)}, "float32", 2**20, {"data": 3, "model": 4})
    weight_bytes = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(fuse(params)):
        share = 1 if "norm" in str(path) else 4
        weight_bytes += leaf.size * 4 // share
    # If devices share a key head, each stores its weights.
    copies = max(4 // key_heads, 1) - 1
    weight_bytes += copies * 2 * 2 * (cfg.head_dim * key_heads * cfg.hidden_size) * 4 // 4
    assert plan["weight_bytes_per_device"] == weight_bytes
    cache = init_cache(split_config(cfg, 4), 1, 128, "float32")
    row = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert plan["largest_batch_by_tokens_per_row"][128] == (
        (int(0.9 * 2**20) - weight_bytes) // row * 3
    )


BAD = {
    "model=0": "model=0: expected data=N",
    "data=2,rows=2": "data=2,rows=2: expected data=N",
    "model": "model: expected data=N",
    "model=64": "needs 64 devices",
}


@pytest.mark.parametrize("mesh", BAD)
def test_a_mesh_that_cannot_be_is_one_line(mesh, capsys):
    try:
        code = run.main(["--mesh", mesh])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and BAD[mesh] in error


def test_a_target_that_cannot_be_split_is_one_line(capsys):
    assert run.main(["--plan", "--target", "demo", "--mesh", "model=2"]) == 2
    assert "num_heads=5 cannot be split over model=2" in capsys.readouterr().err
    assert run.main(["--plan", "--target", "demo", "--mesh", "data=8", "--memory", "1"]) == 0
    assert "on each of the devices of data=8,model=1" in capsys.readouterr().out
