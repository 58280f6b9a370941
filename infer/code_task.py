"""Make a constrained-code task of held-out functions: use these names, and parse.

  python -m infer.code_task DIR            writes DIR/validation.jsonl and DIR/test.jsonl

Each line is the beginning of a standard-library function that the demo models have never seen, and
three names that the function's body uses and the prompt mentions. A module's functions are either
all in the validation file or all in the test file. Sources are read from the running interpreter;
they are only parsed, never run.
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

NAMES = 3  # constraints of a line
VALIDATION_SHARE = 4  # one module in so many is for validation
SKIPPED = {"self", "cls"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    parser = Parser("infer.code_task", __doc__)
    text = "the directory to write both files to"
    parser.add_argument("directory", metavar="DIR", help=text)
    for name, default in (("--test", 100), ("--validation", 40)):
        text = f"number of lines (default: {default})"
        parser.add_argument(name, type=whole(1), default=default, metavar="N", help=text)
    return run("infer.code_task", "infer.code_task:write_task", parser.parse_args(argv))


def write_task(args: argparse.Namespace) -> int:
    """Writes both files; returns the exit code.

    Raises:
      OptionError: there are not as many functions, or the directory cannot be written.
    """
    functions, warnings = held_out_functions()
    for warning in warnings:
        say("infer.code_task", warning)
    lines = _lines_by_file(functions)
    wanted = {"validation": args.validation, "test": args.test}
    for name, count in wanted.items():
        if len(lines[name]) < count:
            raise OptionError(
                f"--{name} {count}: only {len(lines[name])} held-out functions are fit for it; "
                "ask for fewer"
            )

    directory = Path(args.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, count in wanted.items():
            text = "".join(json.dumps(line) + "\n" for line in lines[name][:count])
            write_text(directory / f"{name}.jsonl", text)
    except OSError as error:
        raise OptionError(f"{directory}: cannot be written ({error.strerror})") from None
    return 0


def _lines_by_file(functions: Sequence[HeldOut]) -> dict[str, list[dict]]:
    """The lines of the validation and of the test file."""
    lines = {"validation": [], "test": []}
    for function in functions:
        line = task_line(function)
        if line is not None:
            # The module's hash decides, so that other functions do not change where it goes.
            digest = hashlib.sha256(function.module.encode()).digest()
            name = "test" if digest[0] % VALIDATION_SHARE else "validation"
            lines[name].append(line)
    return lines


def task_line(function: HeldOut) -> dict | None:
    """A function as a line of the task; None if its body shares too few names with the prompt."""
    names: list[str] = []
    for name in names_of(function):
        if name not in names and _occurs(name, function.prompt):
            names.append(name)
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
    # By their ends: an attribute begins where its object does, but its name ends it.
    nodes.sort(key=lambda node: (node.end_lineno, node.end_col_offset))
    for node in nodes:
        name = node.id if isinstance(node, ast.Name) else node.attr
        if name not in SKIPPED and not keyword.iskeyword(name):
            yield name


def _occurs(name: str, prompt: str) -> bool:
    """Whether the prompt has this name as a whole word."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", prompt) is not None


if __name__ == "__main__":
    start(main)
