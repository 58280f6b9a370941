"""Convert a checkpoint of pickles (pytorch_model*.bin) to safetensors; needs the torch extra.

  python -m infer.convert DIR              writes the safetensors beside the pickles
  python -m infer.convert DIR --out OTHER  a new directory, with config and tokenizer

Only tensors are read from the pickles (``weights_only``): no code in them runs.

Exit codes: 0 done, 2 bad arguments or input.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from infer.cli import Parser

KEPT = ("*.json", "*.jinja", "tokenizer.model")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    from specjax.errors import ModelError

    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m infer.convert", description=__doc__, formatter_class=raw)
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--out", metavar="DIR", type=Path, help="where to; default: DIR itself")
    args = parser.parse_args(argv)
    try:
        written = convert(args.directory, args.out or args.directory)
    except (ModelError, OSError) as error:
        print(f"infer.convert: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print("\n".join(map(str, written)))
    return 0


def convert(directory: Path, out: Path) -> list[Path]:
    """Writes each pickle as a safetensors file, and the index of several.

    Returns:
      The files written.
    Raises:
      ModelError: torch is not there, or a pickle is missing or holds more than tensors.
    """
    from specjax.files import write_text
    from specjax.models.hf.checkpoint import INDEX, WEIGHTS
    from specjax.models.hf.pickles import PICKLE_INDEX, read_pickle

    pickles = _pickles(directory)
    out.mkdir(parents=True, exist_ok=True)
    names = {
        p: p.replace("pytorch_model", "model").replace(".bin", ".safetensors") for p in pickles
    }
    written, weight_map, size = [], {}, 0
    for source, name in names.items():
        # Tied tensors share memory, which safetensors does not store.
        tensors = {n: t.clone().contiguous() for n, t in read_pickle(directory / source).items()}
        _write(tensors, out / name)
        weight_map |= dict.fromkeys(tensors, name)
        size += sum(tensor.nbytes for tensor in tensors.values())
        written.append(out / name)
    if list(names.values()) != [WEIGHTS]:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_text(out / INDEX, json.dumps(index, indent=1) + "\n")
        written.append(out / INDEX)
    if out.resolve() != directory.resolve():
        for path in sorted({p for kept in KEPT for p in directory.glob(kept)}):
            if path.name != PICKLE_INDEX:
                shutil.copy(path, out)
    return written


def _pickles(directory: Path) -> list[str]:
    from specjax.errors import ModelError
    from specjax.models.hf.checkpoint import read_json
    from specjax.models.hf.pickles import PICKLE, PICKLE_INDEX

    if (directory / PICKLE).exists():
        return [PICKLE]
    if not (directory / PICKLE_INDEX).exists():
        raise ModelError(f"{directory}: no {PICKLE} and no {PICKLE_INDEX}")
    weight_map = read_json(directory / PICKLE_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise ModelError(f"{directory / PICKLE_INDEX}: no weight_map from tensors to files")
    return sorted(set(weight_map.values()))


def _write(tensors: dict, path: Path) -> None:
    """Aside and renamed: what is there under its name is whole."""
    from safetensors.torch import save_file

    scratch = path.parent / f".{path.name}.{os.getpid()}"
    try:
        save_file(tensors, scratch, metadata={"format": "pt"})
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
