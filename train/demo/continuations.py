"""Lets a model continue functions; its draft model is then distilled on the result.

python -m train.demo.continuations OUT.jsonl --target DIR [--num N] [--max-new-tokens N]

A draft model drafts along the target's own text, which differs from people's text: it is more
repetitive. Distilling on it raises the acceptance rate (DistillSpec, Zhou et al. 2024). The
prompts are heads of functions in the training text, cut in the same way as the held-out ones.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import specjax as sj
from specjax._util.arguments import COUNT
from specjax._util.checks import SEED_MAX, Check
from specjax._util.errors import InputError
from specjax._util.files import aside
from specjax._util.program import Parser, run
from specjax.demo.heldout import parse_functions
from specjax.lm import LM
from train.cli import new_file
from train.data.corpus import Document, is_held_out, load_corpus

NAME = "train.demo.continuations"
_MIN_BODY_LINES = 3
_BATCH = 32


def training_heads(documents: Iterable[Document], seed: int) -> list[str]:
    """Prompts from all functions of the training documents, shuffled."""
    heads = []
    for document in documents:
        if is_held_out(document.name):
            continue
        try:
            functions = list(parse_functions(document.text, document.name))
        except (SyntaxError, ValueError):
            continue  # a template, or code for another version of Python
        for function in functions:
            if function.reference.count("\n") >= _MIN_BODY_LINES:
                heads.append(function.prompt)
    random.Random(seed).shuffle(heads)
    return heads


def continued(target: LM, heads: list[str], max_new_tokens: int, seed: int) -> Iterator[str]:
    """Each head with its continuation: three of four batches greedy, the fourth at T = 1."""
    # The rows of a batch are padded to the longest: similar lengths waste little.
    heads = sorted(heads, key=len)
    for number, first in enumerate(range(0, len(heads), _BATCH)):
        batch = heads[first : first + _BATCH]
        out = sj.generate(
            target,
            batch,
            max_new_tokens=max_new_tokens,
            sampling=sj.Sampling(temperature=float(number % 4 == 3)),
            seed=seed,
            indices=range(first, first + len(batch)),
        )
        yield from (head + text for head, text in zip(batch, out.text, strict=True))


def write(path: Path, texts: Iterable[str]) -> int:
    """Writes a JSONL file atomically; returns the number of lines."""
    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside(path) as scratch, scratch.open("w", encoding="utf-8") as file:
            for text in texts:
                file.write(json.dumps({"text": text}) + "\n")
                count += 1
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    return count


def work(args: argparse.Namespace) -> int:
    count = COUNT.parse("--num", args.num)
    new_tokens = COUNT.parse("--max-new-tokens", args.max_new_tokens)
    seed = Check(int, low=0, high=SEED_MAX).parse("--seed", args.seed)
    target = sj.load(args.target)
    heads = training_heads(load_corpus(["stdlib"]), seed)[:count]
    written = write(args.out, continued(target, heads, new_tokens, seed))
    print(f"{written} continued functions written to {args.out}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(NAME, __doc__)
    parser.add_argument("out", type=new_file)
    parser.add_argument("--target", required=True, help="a Hugging Face directory, or demo")
    parser.add_argument("--num", type=int, default=5000, help="documents (default 5000)")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    return run(NAME, f"{__name__}:work", parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
