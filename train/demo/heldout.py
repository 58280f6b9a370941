"""Writes the manifest of held-out functions: `python -m train.demo.heldout OUT`.

It lists functions of the standard-library files that `is_held_out` keeps out of training, except
those whose code is repeated in other files of the corpus.
"""

import argparse
import json
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

from specjax._util.errors import InputError
from specjax._util.files import write_text
from specjax._util.program import Parser, run
from specjax.demo.heldout import MANIFEST, PROMPT_CHARS, HeldOut, parse_functions
from train.cli import new_file
from train.data.corpus import Document, is_held_out, load_corpus

NAME = "train.demo.heldout"
BODY_LINES = range(6, 61)
_REPEATED_LINES = 6  # this many equal lines in a row are a copy, not a common idiom


def build_manifest(documents: Iterable[Document]) -> dict:
    """The manifest as `specjax.demo.heldout` reads it, from the corpora that models train on."""
    held_out = []
    trained = set()
    for document in documents:
        if not is_held_out(document.name):
            trained |= _line_runs(document.text)
        elif document.name.startswith("stdlib/"):
            held_out.append(document)
    # Modules take turns, so that the first functions come from many of them.
    by_module = [_select(document, trained) for document in held_out]
    functions = []
    for group in zip_longest(*by_module):
        functions += [function for function in group if function is not None]
    entries = [{"module": f.module, "name": f.name, "sha256": f.sha256} for f in functions]
    return {"python": platform.python_version(), "functions": entries}


def _select(document: Document, trained: set[int]) -> list[HeldOut]:
    """The functions of one file that are worth completing, in the file's order."""
    functions = list(parse_functions(document.text, _module(document.name)))
    count = Counter(function.name for function in functions)
    selected = []
    for function in functions:
        # A name that occurs twice, such as a property and its setter, is ambiguous.
        unique = count[function.name] == 1
        good_length = function.reference.count("\n") in BODY_LINES
        # The prompt is cut to PROMPT_CHARS, and must still hold the signature.
        fits = len(function.source) - len(function.reference) < PROMPT_CHARS
        if unique and good_length and fits and _line_runs(function.source).isdisjoint(trained):
            selected.append(function)
    return selected


def _module(name: str) -> str:
    """`stdlib/json/__init__.py` → `json`."""
    path = name.removeprefix("stdlib/").removesuffix(".py").removesuffix("/__init__")
    return path.replace("/", ".")


def _line_runs(text: str) -> set[int]:
    """Hashes of all runs of `_REPEATED_LINES` lines, without blank lines and comments."""
    lines = [line.strip() for line in text.split("\n")]
    lines = [line for line in lines if line and not line.startswith("#")]
    starts = range(len(lines) - _REPEATED_LINES + 1)
    return {hash(tuple(lines[start : start + _REPEATED_LINES])) for start in starts}


def write_manifest(manifest: dict, path: Path) -> None:
    """Writes the JSON, one function per line."""
    entries = ",\n".join(json.dumps(entry) for entry in manifest["functions"])
    text = f'{{"python": {json.dumps(manifest["python"])}, "functions": [\n{entries}\n]}}\n'
    try:
        write_text(path, text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def work(args: argparse.Namespace) -> int:
    manifest = build_manifest(load_corpus(["stdlib", "installed"]))
    write_manifest(manifest, args.out)
    print(f"{len(manifest['functions'])} held-out functions written to {args.out}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(NAME, __doc__)
    text = "the file to write (default: the one in the package)"
    parser.add_argument(
        "out", nargs="?", metavar="FILE", type=new_file, default=MANIFEST, help=text
    )
    return run(NAME, f"{__name__}:work", parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
