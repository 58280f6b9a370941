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
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from infer.cli import whole
from specjax._util.errors import OptionError
from specjax._util.files import write_text
from specjax._util.program import Parser, run, say, start
from specjax.demo.heldout import HeldOut, held_out_functions

NAMES = 3  # of a line
VALIDATION_SHARE = 4  # one module in so many is for validation
SKIPPED = {"self", "cls"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    parser = Parser("infer.code_task", __doc__)
    parser.add_argument("directory", metavar="DIR")
    for name, lines in (("--test", 100), ("--validation", 40)):
        said = f"lines (default {lines})"
        parser.add_argument(name, type=whole(1), default=lines, metavar="N", help=said)
    return run("infer.code_task", "infer.code_task:write_task", parser.parse_args(argv))


def write_task(args: argparse.Namespace) -> int:
    """Writes both files.

    Raises:
      OptionError: there are not as many functions, or the directory cannot be written.
    """
    functions, warnings = held_out_functions()
    for warning in warnings:
        say("infer.code_task", warning)
    lines = {"validation": [], "test": []}
    for function in functions:
        line = task_line(function)
        if line is not None:
            digest = hashlib.sha256(function.module.encode()).digest()
            lines["test" if digest[0] % VALIDATION_SHARE else "validation"].append(line)
    wanted = {"validation": args.validation, "test": args.test}
    for name, count in wanted.items():
        if len(lines[name]) < count:
            raise OptionError(
                f"--{name} {count}: only {len(lines[name])} held-out functions are fit for it; "
                "ask for fewer"
            )
    home = Path(args.directory)
    try:
        home.mkdir(parents=True, exist_ok=True)
        for name, count in wanted.items():
            text = "".join(json.dumps(line) + "\n" for line in lines[name][:count])
            write_text(home / f"{name}.jsonl", text)
    except OSError as error:
        raise OptionError(f"{home}: cannot be written ({error.strerror})") from None
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
    body = ast.parse(textwrap.dedent(function.source)).body[0].body
    parts = ast.walk(ast.Module(body, type_ignores=[]))
    nodes = [node for node in parts if isinstance(node, ast.Name | ast.Attribute)]
    nodes.sort(key=lambda n: (n.end_lineno, n.end_col_offset))
    for node in nodes:
        name = node.id if isinstance(node, ast.Name) else node.attr
        if name not in SKIPPED and not keyword.iskeyword(name):
            yield name


def _occurs(name: str, prompt: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", prompt) is not None


if __name__ == "__main__":
    start(main)
