"""A checkpoint with more heads, those added being zeros: what ``infer.convert --heads`` does."""

from __future__ import annotations

import argparse
import os
import shutil

from infer.unpickle import copy_rest
from specjax._util.errors import InputError, system_error
from specjax.lm import locate
from specjax.models import load_pretrained, save_pretrained
from specjax.models.hf.files import read_json
from specjax.models.hf.layout import DTYPES, WEIGHTS
from specjax.models.padded_heads import pad_heads

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"


def convert(args: argparse.Namespace) -> int:
    """Writes the directory and prints its file of weights; returns the exit code.

    Raises:
      ModelError: the checkpoint cannot be read, or has no use for such heads.
      InputError: the file exists and ``--overwrite`` is not given, or it is the source's own.
    """
    source = locate(os.fspath(args.directory))
    weights = args.out / WEIGHTS
    if os.path.realpath(args.out) == os.path.realpath(source):
        raise InputError(f"--out {args.out}: would replace the checkpoint itself; choose another")
    if os.path.lexists(weights) and not args.overwrite:
        raise InputError(f"{weights} exists already: give --overwrite, or another --out")
    cfg, params = pad_heads(*load_pretrained(source), args.heads)
    config = read_json(source / CONFIG)
    stored = config.get("dtype") or config.get("torch_dtype")
    dtype = stored if isinstance(stored, str) and stored in DTYPES else "float32"
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        copy_rest(source, args.out, leave=(CONFIG,))
        if not (source / TOKENIZER).exists() and (source.parent / TOKENIZER).exists():
            shutil.copy(source.parent / TOKENIZER, args.out)  # the embedded models share one
        save_pretrained(args.out, cfg, params, dtype=dtype)
    except OSError as error:  # a full disk, for example
        raise InputError(system_error(error)) from None
    print(weights)
    return 0
