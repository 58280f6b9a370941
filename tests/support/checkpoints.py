"""Model directories for the tests: compared, split into shards, and edited."""

import json

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from specjax.models.hf.layout import INDEX, WEIGHTS


def same(a, b):
    """Whether two trees hold the same arrays."""
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def shard(directory):
    """Splits the weights into two files with an index, as in large checkpoints."""
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def edit_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_weights(directory, change):
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)
