"""Make a constrained-code task of held-out functions: use these names, and parse.

  python -m infer.code_task DIR            writes DIR/validation.jsonl and DIR/test.jsonl

Each line is the beginning of a standard-library function that the demo models have never seen
and three names that its own body uses and that the prompt mentions. Modules are either in the
validation or in the test file. Sources are read from the running interpreter, and only parsed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import keyword
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from infer.cli import Parser, whole
from specjax.demo.heldout import HeldOut, held_out_functions

NAMES = 3  # of a line
VALIDATION_SHARE = 4  # one module in so many is for validation
SKIPPED = {"self", "cls"}


def parser() -> Parser:
    """The command line of ``infer.code_task``."""
    out = Parser(
        prog="python -m infer.code_task",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("directory", metavar="DIR")
    out.add_argument("--test", type=whole(1), default=100, metavar="N", help="lines (default 100)")
    out.add_argument(
        "--validation", type=whole(1), default=40, metavar="N", help="lines (default 40)"
    )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    args = parser().parse_args(argv)
    functions, warnings = held_out_functions()
    for warning in warnings:
        print(f"infer.code_task: {warning}", file=sys.stderr)
    wanted = {"validation": args.validation, "test": args.test}
    found = {name: [] for name in wanted}
    for function in functions:
        line = task_line(function)
        if line is not None:
            found["validation" if _validates(function.module) else "test"].append(line)
    for name, count in wanted.items():
        if len(found[name]) < count:
            print(
                f"infer.code_task: --{name} {count}: only {len(found[name])} held-out functions "
                "are fit for it; ask for fewer",
                file=sys.stderr,
            )
            return 2
    home = Path(args.directory)
    try:
        home.mkdir(parents=True, exist_ok=True)
        for name, count in wanted.items():
            text = "".join(json.dumps(line) + "\n" for line in found[name][:count])
            (home / f"{name}.jsonl").write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"infer.code_task: {home}: cannot be written ({error.strerror})", file=sys.stderr)
        return 2
    return 0


def task_line(function: HeldOut) -> dict | None:
    """A function as a line of the task; None where its body names too little of the prompt."""
    names = list(dict.fromkeys(n for n in names_of(function) if _occurs(n, function.prompt)))
    if len(names) < NAMES:
        return None
    return {
        "id": function.id,
        "prompt": function.prompt,
        "constraints": [f"={name}" for name in names[:NAMES]],
    }


def names_of(function: HeldOut) -> Iterator[str]:
    """The names that the function's body uses, in the order of its text."""
    tree = ast.parse(textwrap.dedent(function.source))
    body = tree.body[0].body
    nodes = [
        n
        for statement in body
        for n in ast.walk(statement)
        if isinstance(n, ast.Name | ast.Attribute)
    ]
    nodes.sort(key=lambda n: (n.end_lineno, n.end_col_offset))
    for node in nodes:
        name = node.id if isinstance(node, ast.Name) else node.attr
        if name not in SKIPPED and not keyword.iskeyword(name):
            yield name


def _occurs(name: str, prompt: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", prompt) is not None


def _validates(module: str) -> bool:
    return hashlib.sha256(module.encode()).digest()[0] % VALIDATION_SHARE == 0


if __name__ == "__main__":
    sys.exit(main())
