"""Convert a checkpoint of pickles (pytorch_model*.bin) to safetensors; needs the torch extra.

  python -m infer.convert DIR              writes the safetensors beside the pickles
  python -m infer.convert DIR --out OTHER  a new directory, with config and tokenizer

Only tensors are read from the pickles (``weights_only``): no code in them runs.

Exit codes: 0 done, 2 bad arguments or input.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specjax.program import Parser, run, start


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    parser = Parser("infer.convert", __doc__)
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--out", metavar="DIR", type=Path, help="where to; default: DIR itself")
    said = "replace safetensors files that are there already"
    parser.add_argument("--overwrite", action="store_true", help=said)
    return run("infer.convert", "infer.unpickle:convert", parser.parse_args(argv))


if __name__ == "__main__":
    start(main)
