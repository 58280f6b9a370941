"""Hugging Face directories: strict loading and saving of config.json + safetensors.

Every tensor of the model must be in the files with its exact shape and every tensor of the
files must be one of the model's: what does not match is an error by name. Nothing that a
checkpoint contains is executed.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten_with_path
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specjax.errors import ModelError
from specjax.models.config import ModelConfig, from_hf, to_hf
from specjax.models.functional import param_shapes

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
STORED_DTYPES = ("F32", "BF16", "F16")  # safetensors' names of the same

_TOP = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}
_MODULES = {
    "norm": "model.norm",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def hf_name(path: tuple[str, ...]) -> str:
    """The checkpoint's name of the parameter at ``path`` of our nested dict."""
    if len(path) == 1:
        return _TOP[path[0]]
    if path[0] != "layers":
        return f"{_MODULES[path[0]]}.{path[-1]}"
    return f"model.layers.{path[1]}.{_MODULES['.'.join(path[2:-1])]}.{path[-1]}"


def load_pretrained(
    directory: str | Path, dtype: jnp.dtype = jnp.float32
) -> tuple[ModelConfig, dict]:
    """Reads a model directory, tensor by tensor onto the device.

    Returns:
      The config and the params as a nested dict of arrays of ``dtype``.
    Raises:
      ModelError: missing or unreadable files, a missing, unknown or misshapen tensor, or a
        config feature that is not supported; each by name.
    """
    directory = Path(directory)
    cfg = from_hf(read_config(directory))
    shapes, tree = tree_flatten_with_path(param_shapes(cfg))
    wanted = {hf_name(tuple(k.key for k in path)): leaf.shape for path, leaf in shapes}
    files = _tensor_files(directory)
    _check_names(directory, cfg, set(wanted), set(files))
    handles = {file: _open(file) for file in sorted(set(files.values()))}
    leaves = [
        _read(handles[files[name]], files[name], name, shape, dtype)
        for name, shape in wanted.items()
    ]
    return cfg, jax.tree.unflatten(tree, leaves)


def save_pretrained(
    directory: str | Path,
    cfg: ModelConfig,
    params: dict,
    tokenizer_json: str | None = None,
    dtype: str = "float32",
) -> None:
    """Writes a directory that transformers loads unchanged.

    Each file is written aside and renamed, config.json last, so that a directory with a
    config is complete. ``tokenizer_json`` is the text of a ``tokenizer.json``.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    leaves = tree_flatten_with_path(params)[0]
    tensors = {
        hf_name(tuple(k.key for k in path)): np.asarray(leaf.astype(DTYPES[dtype]))
        for path, leaf in leaves
    }
    scratch = directory / f".{WEIGHTS}.{os.getpid()}"
    try:
        save_file(tensors, scratch, metadata={"format": "pt"})
        scratch.chmod(0o644)  # safetensors makes it readable by its owner alone
        os.replace(scratch, directory / WEIGHTS)
    except SafetensorError as error:
        raise OSError(f"cannot write {directory / WEIGHTS}: {error}") from None
    finally:
        scratch.unlink(missing_ok=True)
    if tokenizer_json is not None:
        write_text(directory / "tokenizer.json", tokenizer_json)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        write_text(directory / "tokenizer_config.json", json.dumps(settings, indent=1) + "\n")
    write_text(directory / "config.json", json.dumps(to_hf(cfg, dtype), indent=1) + "\n")


def read_config(directory: Path) -> dict:
    """``config.json`` of a model directory as a dict."""
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such model directory")
    path = directory / "config.json"
    if not path.exists():
        raise ModelError(f"{directory}: no config.json, so this is no model directory")
    return read_json(path)


def read_json(path: Path) -> dict:
    """The JSON object in a file; an empty one where there is no file.

    Raises:
      ModelError: the file holds something else.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def write_text(path: Path, text: str) -> None:
    """Writes a text file aside and renames it, so that it is never half there."""
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(scratch, 0o644)
    os.replace(scratch, path)


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Which file holds each tensor; the files are opened, so a broken one is found.

    A single file goes before an index, as in transformers: saving over a sharded directory
    leaves its old index behind.
    """
    single, index = directory / WEIGHTS, directory / INDEX
    if single.exists():
        return dict.fromkeys(_open(single).keys(), single)
    if not index.exists():
        pickles = sorted(p.name for p in directory.glob("*.bin"))
        hint = f"; {pickles[0]} is a pickle: convert it to safetensors" if pickles else ""
        raise ModelError(f"{directory}: no {WEIGHTS} and no {INDEX}{hint}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise ModelError(f"{index}: no weight_map from tensors to files")
    shards = {name: directory / name for name in sorted(set(weight_map.values()))}
    for name, path in shards.items():
        if not path.exists():
            raise ModelError(f"{directory}: shard {name}, named by {INDEX}, is missing")
    held = {name: set(_open(path).keys()) for name, path in shards.items()}
    for tensor, shard in weight_map.items():
        if tensor not in held[shard]:
            raise ModelError(
                f"{directory / shard}: lacks tensor {tensor}, which {INDEX} puts there"
            )
    return {tensor: path for name, path in shards.items() for tensor in sorted(held[name])}


def _open(path: Path):
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a readable safetensors file ({error})") from None


def _check_names(directory: Path, cfg: ModelConfig, wanted: set[str], found: set[str]) -> None:
    missing = sorted(wanted - found)
    if missing:
        raise ModelError(f"{directory}: tensor {missing[0]} is missing{_more(missing)}")
    extra = {name for name in found - wanted if not name.endswith("rotary_emb.inv_freq")}
    if cfg.tie_embeddings:
        extra.discard("lm_head.weight")  # a saved copy of the embedding
    if extra:
        names = sorted(extra)
        raise ModelError(f"{directory}: tensor {names[0]} belongs to no part of the model that "
                         f"config.json describes{_more(names)}")  # fmt: skip


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _read(handle, path: Path, name: str, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    stored = handle.get_slice(name)
    found = tuple(stored.get_shape())
    if found != shape:
        raise ModelError(
            f"{path}: tensor {name} has shape {list(found)}, config.json says {list(shape)}"
        )
    if stored.get_dtype() not in STORED_DTYPES:
        raise ModelError(f"{path}: tensor {name} is stored as {stored.get_dtype()}; supported: "
                         f"{', '.join(STORED_DTYPES)}")  # fmt: skip
    return jnp.asarray(handle.get_tensor(name), dtype)
