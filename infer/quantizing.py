"""A checkpoint with quantized weights: what ``infer.convert --quantize`` does."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from infer.unpickle import copy_rest
from specjax._util.errors import InputError, ModelError, system_error
from specjax.lm import locate
from specjax.models import load_pretrained
from specjax.models.hf.files import read_json
from specjax.models.hf.layout import WEIGHTS
from specjax.models.hf.read import stored_form
from specjax.models.hf.write import save_quantized
from specjax.models.quantization import Scheme, parse_scheme

TOKENIZER = "tokenizer.json"


def convert(args: argparse.Namespace) -> int:
    """Writes the directory and prints its file of weights; returns the exit code.

    Raises:
      SpecjaxError: as :func:`write_quantized`, or a file cannot be read or written.
    """
    try:
        weights = write_quantized(
            args.directory, args.out, args.quantize, args.overwrite, args.pickles
        )
    except OSError as error:  # a full disk, for example
        raise InputError(system_error(error)) from None
    print(weights)
    return 0


def write_quantized(
    source: Path, out: Path, scheme: str, overwrite: bool = False, pickles: bool = False
) -> Path:
    """Quantizes a checkpoint, layer by layer, into a directory of its own.

    Returns:
      The file of weights.
    Raises:
      ModelError: the checkpoint cannot be read, or the scheme does not fit it.
      InputError: the file exists and ``overwrite`` is not set, or it is the source's own.
    """
    source = locate(os.fspath(source))
    weights = out / WEIGHTS
    if os.path.realpath(out) == os.path.realpath(source):
        raise InputError(f"--out {out}: would replace the checkpoint itself; choose another")
    if os.path.lexists(weights) and not overwrite:
        raise InputError(f"{weights} exists already: give --overwrite, or another --out")

    parsed = parse_scheme(scheme)  # checked before the weights are read
    if isinstance(stored_form(source), Scheme):
        raise ModelError(f"{source}: its weights are quantized already")
    cfg, params = load_pretrained(source, fused=True, pickles=pickles, quantize=scheme)
    config = read_json(source / "config.json")

    out.mkdir(parents=True, exist_ok=True)
    copy_rest(source, out, leave=("config.json",))
    if not (source / TOKENIZER).exists() and (source.parent / TOKENIZER).exists():
        shutil.copy(source.parent / TOKENIZER, out)  # target and draft may share the one above
    save_quantized(out, cfg, config, params, parsed)
    return weights
