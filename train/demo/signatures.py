"""Writes signatures of functions of the training text, for a target to continue.

python -m train.demo.signatures OUT.jsonl [--num N]
python -m train.answers OUT.jsonl WRITTEN.jsonl --target DIR --chat-template configs/plain.jinja

A draft model drafts along the target's own text, which differs from people's text: it is more
repetitive. Distilling on it raises the acceptance rate (DistillSpec, Zhou et al. 2024). The
signatures are cut in the same way as the held-out ones: some lines before, signature, docstring.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from specjax._util.arguments import COUNT
from specjax._util.checks import SEED_MAX, Check
from specjax._util.errors import InputError
from specjax._util.files import aside
from specjax._util.program import Parser, run
from specjax.demo.heldout import parse_functions
from train.cli import new_file
from train.data.corpus import Document, is_held_out, load_corpus

NAME = "train.demo.signatures"
_MIN_BODY_LINES = 3


def training_signatures(documents: Iterable[Document], seed: int) -> list[str]:
    """Prompts from all functions of the training documents, shuffled."""
    signatures = []
    for document in documents:
        if is_held_out(document.name):
            continue
        try:
            functions = list(parse_functions(document.text, document.name))
        except (SyntaxError, ValueError):
            continue  # a template, or code for another version of Python
        for function in functions:
            if function.reference.count("\n") >= _MIN_BODY_LINES:
                signatures.append(function.prompt)
    random.Random(seed).shuffle(signatures)
    return signatures


def write(path: Path, signatures: Iterable[str]) -> int:
    """Writes a JSONL file of prompts atomically; returns the number of lines."""
    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside(path) as scratch, scratch.open("w", encoding="utf-8") as file:
            for signature in signatures:
                file.write(json.dumps({"prompt": signature}) + "\n")
                count += 1
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    return count


def work(args: argparse.Namespace) -> int:
    count = COUNT.parse("--num", args.num)
    seed = Check(int, low=0, high=SEED_MAX).parse("--seed", args.seed)
    written = write(args.out, training_signatures(load_corpus(["stdlib"]), seed)[:count])
    print(f"{written} signatures of functions written to {args.out}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(NAME, __doc__)
    parser.add_argument("out", metavar="FILE", type=new_file, help="the file to write")
    text = "number of functions (default: %(default)s)"
    parser.add_argument("--num", type=int, default=5000, metavar="N", help=text)
    text = "seed of their order (default: %(default)s)"
    parser.add_argument("--seed", type=int, default=0, metavar="S", help=text)
    return run(NAME, f"{__name__}:work", parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
