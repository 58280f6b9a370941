"""A GGUF file as a Hugging Face directory: what ``infer.convert FILE.gguf`` does."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from specjax._util.errors import InputError, system_error
from specjax._util.files import write_text
from specjax.lm import locate
from specjax.models import save_pretrained
from specjax.models.gguf.read import load_gguf
from specjax.models.hf.layout import WEIGHTS
from specjax.text.tokenizer import Tokenizer


def convert(args: argparse.Namespace) -> int:
    """Writes the directory and prints its file of weights; returns the exit code.

    Raises:
      SpecjaxError: as :func:`write_directory`, or a file cannot be written.
    """
    if args.out is None:
        raise InputError(f"{args.directory}: a GGUF file needs --out, the directory to write")
    if args.quantize:
        raise InputError(
            f"{args.directory}: its weights are quantized; --quantize int8 of infer.run quantizes "
            "them anew as they load"
        )
    try:
        print(write_directory(args.directory, args.out, args.overwrite))
    except OSError as error:  # a full disk, for example
        raise InputError(system_error(error)) from None
    return 0


def write_directory(source: Path, out: Path, overwrite: bool = False) -> Path:
    """Dequantizes a GGUF file into a directory of its own, float32, which transformers reads, too.

    Returns:
      The file of weights.
    Raises:
      ModelError: the file cannot be read.
      InputError: the weights exist and ``overwrite`` is not set.
    """
    path = locate(os.fspath(source))
    weights = out / WEIGHTS
    if os.path.lexists(weights) and not overwrite:
        raise InputError(f"{weights} exists already: give --overwrite, or another --out")
    tokenizer = Tokenizer.from_gguf(path)
    cfg, params = load_gguf(path)
    save_pretrained(out, cfg, params, tokenizer.to_json())
    settings = json.dumps(tokenizer.settings(), ensure_ascii=False, indent=1)
    write_text(out / "tokenizer_config.json", settings)
    return weights
