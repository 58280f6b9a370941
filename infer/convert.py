"""Convert a checkpoint: pickles or GGUF to safetensors, weights to 8 or 4 bits, or more heads.

  python -m infer.convert DIR              writes the safetensors beside the pickles
  python -m infer.convert DIR --out OTHER  a new directory, with config and tokenizer
  python -m infer.convert FILE.gguf --out OTHER
                                           a directory of float32, which transformers reads
  python -m infer.convert DIR --quantize int8 --out OTHER
                                           quantized weights, which only specjax reads
  python -m infer.convert DIR --heads 8 --out OTHER
                                           the same model with heads of zeros, so that 2, 4 or 8
                                           devices can share it

Pickles (pytorch_model*.bin) need the torch extra, GGUF files the gguf extra. Only tensors are read
from them: no code in them runs.

Exit codes: 0 done, 1 the system failed, 2 bad arguments or input.
"""

from __future__ import annotations

from collections.abc import Sequence

from infer.cli import path, scheme, whole
from specjax._util.program import Parser, run, start


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    parser = Parser("infer.convert", __doc__)
    text = "the checkpoint's directory, or a GGUF file"
    parser.add_argument("directory", metavar="DIR", type=path, help=text)
    text = "the directory to write to (default: DIR itself)"
    parser.add_argument("--out", metavar="DIR", type=path, help=text)
    text = "replace safetensors files that exist already"
    parser.add_argument("--overwrite", action="store_true", help=text)
    text = "int8, fp8, int4 or int4:GROUP (inputs that share a scale)"
    parser.add_argument("--quantize", type=scheme, metavar="SCHEME", help=text)
    text = "add heads of zeros, so that the model has N"
    parser.add_argument("--heads", type=whole(1, 4096), metavar="N", help=text)
    text = "with --quantize: read pickles if there are no safetensors"
    parser.add_argument("--pickles", action="store_true", help=text)
    args = parser.parse_args(argv)
    if args.quantize and args.out is None:
        parser.error("--quantize writes a new directory; give --out DIR")
    if args.heads and args.out is None:
        parser.error("--heads writes a new directory; give --out DIR")
    if args.heads and args.quantize:
        parser.error("--heads and --quantize exclude each other: quantize what --heads has written")
    return run("infer.convert", "infer.converting:convert", args)


if __name__ == "__main__":
    start(main)
