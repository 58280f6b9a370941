"""Pickled checkpoints as safetensors files: what ``infer.convert`` does."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from specjax._util.errors import InputError, ModelError, foreign
from specjax._util.files import aside, write_text
from specjax.models.hf.files import read_weight_map
from specjax.models.hf.layout import INDEX, WEIGHTS
from specjax.models.hf.pickles import PICKLE, PICKLE_INDEX, read_pickle

KEPT = ("*.json", "*.jinja", "tokenizer.model")


def convert(args: argparse.Namespace) -> int:
    """Converts the checkpoint and prints which files were written.

    Raises:
      SpecjaxError: as :func:`write_safetensors`, or a file cannot be read or written.
    """
    try:
        written = write_safetensors(args.directory, args.out or args.directory, args.overwrite)
    except (OSError, SafetensorError) as error:  # a full disk, say
        raise InputError(str(error)) from None
    print(*written, sep="\n")
    return 0


def write_safetensors(directory: Path, out: Path, overwrite: bool = False) -> list[Path]:
    """Writes each pickle as a safetensors file, and the index of several.

    Returns:
      The files written.
    Raises:
      ModelError: torch is not there, or a pickle is missing or holds more than tensors.
      InputError: a file would be replaced, and not to ``overwrite``.
    """
    written, weight_map, size = [], {}, 0
    names = {
        p: p.replace("pytorch_model", "model").removesuffix(".bin") + ".safetensors"
        for p in _pickles(directory)
    }
    known = [out / name for name in (*names.values(), INDEX) if (out / name).exists()]
    if known and not overwrite:
        raise InputError(f"{known[0]} is there already: give --overwrite, or another --out")
    out.mkdir(parents=True, exist_ok=True)
    for source, name in names.items():
        # Tied tensors share memory, which safetensors does not store.
        tensors = {n: t.clone().contiguous() for n, t in read_pickle(directory / source).items()}
        with foreign(f"{directory / source}: cannot be written as safetensors"):
            _write(tensors, out / name)
        weight_map |= dict.fromkeys(tensors, name)
        size += sum(tensor.nbytes for tensor in tensors.values())
        written.append(out / name)
    if written != [out / WEIGHTS]:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_text(out / INDEX, json.dumps(index, indent=1) + "\n")
        written.append(out / INDEX)
    if out.resolve() != directory.resolve():
        copy_rest(directory, out)
    return written


def copy_rest(directory: Path, out: Path, leave: tuple[str, ...] = ()) -> None:
    """Copies what a checkpoint has beside its weights, but for ``leave``."""
    for path in sorted({p for kept in KEPT for p in directory.glob(kept)}):
        if path.name not in (PICKLE_INDEX, INDEX, *leave):
            shutil.copy(path, out)


def _pickles(directory: Path) -> list[str]:
    """The names of the checkpoint's pickles."""
    if os.path.lexists(directory / PICKLE):
        return [PICKLE]
    if not os.path.lexists(directory / PICKLE_INDEX):
        raise ModelError(f"{directory}: no {PICKLE} and no {PICKLE_INDEX}")
    return sorted(set(read_weight_map(directory / PICKLE_INDEX).values()))


def _write(tensors: dict, path: Path) -> None:
    from safetensors.torch import save_file

    with aside(path) as scratch:
        save_file(tensors, scratch, metadata={"format": "pt"})
