"""Which conversion the arguments of ``infer.convert`` ask for."""

from __future__ import annotations

import argparse
import os

from infer import gguf_directory, padding_heads, quantizing, unpickle
from specjax._util.errors import InputError
from specjax.models.gguf.header import ENDING
from specjax.models.gguf.packages import PACKAGES


def convert(args: argparse.Namespace) -> int:
    """Converts a GGUF file, adds heads, quantizes or rewrites pickles; returns the exit code.

    Raises:
      SpecjaxError: as the ``convert`` of the module that does it.
    """
    if os.fspath(args.directory) in PACKAGES or args.directory.suffix == ENDING:
        if args.heads:
            raise InputError(
                f"{args.directory}: --heads takes a directory: make one of the GGUF file first"
            )
        return gguf_directory.convert(args)
    if args.heads:
        return padding_heads.convert(args)
    if args.quantize:
        return quantizing.convert(args)
    return unpickle.convert(args)
