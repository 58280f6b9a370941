"""Pickled checkpoints as safetensors files: what ``infer.convert`` does."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from specjax._util.errors import InputError, ModelError, errors_as, system_error
from specjax._util.files import aside, write_text
from specjax.models.hf.files import read_weight_map, unlisted_shards
from specjax.models.hf.layout import INDEX, WEIGHTS
from specjax.models.hf.pickles import PICKLE, PICKLE_INDEX, read_pickle

# What a converted checkpoint keeps besides its weights: configs and tokenizers.
COPIED = ("*.json", "*.jinja", "tokenizer.model")


def convert(args: argparse.Namespace) -> int:
    """Converts the checkpoint and prints which files were written; returns the exit code.

    Raises:
      SpecjaxError: as :func:`write_safetensors`, or a file cannot be read or written.
    """
    try:
        written = write_safetensors(args.directory, args.out or args.directory, args.overwrite)
    except OSError as error:  # a full disk, for example
        raise InputError(system_error(error)) from None
    except SafetensorError as error:
        raise InputError(error) from None
    print(*written, sep="\n")
    return 0


def write_safetensors(directory: Path, out: Path, overwrite: bool = False) -> list[Path]:
    """Writes each pickle as a safetensors file, and an index if there are several.

    Returns:
      The files written.
    Raises:
      ModelError: torch is not installed, or a pickle is missing or has more than tensors.
      InputError: a file exists, and ``overwrite`` is not set.
    """
    names = {pickle: _safetensors_name(pickle) for pickle in _pickles(directory)}
    for name in (*names.values(), WEIGHTS, INDEX):
        if os.path.lexists(out / name) and not overwrite:
            raise InputError(f"{out / name} exists already: give --overwrite, or another --out")
    out.mkdir(parents=True, exist_ok=True)

    written = []
    weight_map: dict[str, str] = {}
    size = 0
    for pickle, name in names.items():
        tensors = {}
        for key, tensor in read_pickle(directory / pickle).items():
            tensors[key] = tensor.clone().contiguous()  # safetensors does not store shared memory
        with errors_as(f"{directory / pickle}: cannot be written as safetensors"):
            _write(tensors, out / name)
        weight_map |= dict.fromkeys(tensors, name)
        size += sum(tensor.nbytes for tensor in tensors.values())
        written.append(out / name)

    if written != [out / WEIGHTS]:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_text(out / INDEX, json.dumps(index, indent=1) + "\n")
        written.append(out / INDEX)
        (out / WEIGHTS).unlink(missing_ok=True)  # of another checkpoint; it would be read first
    if os.path.realpath(out) != os.path.realpath(directory):
        copy_rest(directory, out)
    return written


def copy_rest(directory: Path, out: Path, leave: tuple[str, ...] = ()) -> None:
    """Copies a checkpoint's files other than its weights, except for those of ``leave``."""
    paths = {path for pattern in COPIED for path in directory.glob(pattern)}
    for path in sorted(paths):
        if path.name not in (PICKLE_INDEX, INDEX, *leave):
            shutil.copy(path, out)


def _pickles(directory: Path) -> list[str]:
    """The names of the checkpoint's pickles."""
    if os.path.lexists(directory / PICKLE):
        return [PICKLE]
    if os.path.lexists(directory / PICKLE_INDEX):
        return sorted(set(read_weight_map(directory / PICKLE_INDEX).values()))
    shards = {path.name for path in unlisted_shards(directory, PICKLE, PICKLE_INDEX).values()}
    if not shards:
        raise ModelError(f"{directory}: no {PICKLE} and no {PICKLE_INDEX}")
    return sorted(shards)


def _safetensors_name(pickle: str) -> str:
    """``model-00001.safetensors`` for ``pytorch_model-00001.bin``, as transformers names it."""
    return pickle.replace("pytorch_model", "model").removesuffix(".bin") + ".safetensors"


def _write(tensors: dict, path: Path) -> None:
    from safetensors.torch import save_file

    with aside(path) as scratch:
        save_file(tensors, scratch, metadata={"format": "pt"})
