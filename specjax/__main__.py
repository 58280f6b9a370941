"""The command ``specjax``, which starts every program: ``specjax run`` is ``python -m infer.run``.

It works beside a file ``train.py`` or ``infer.py``, where ``python -m`` would import that one. The
programs are loaded by name: the library imports none of them.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

from specjax._util.program import BAD_INPUT, COMMAND, Parser, say, start


class Program(NamedTuple):
    """A program.

    Attributes:
      module: what follows ``python -m``.
      main: the module that has its function ``main``.
      text: what it does, in a line.
    """

    module: str
    main: str
    text: str


PROGRAMS = {
    "run": Program("infer.run", "infer.run.commands", "decode a prompt, or a file of prompts"),
    "bench": Program("infer.bench", "infer.bench.commands", "measure methods side by side"),
    "serve": Program("infer.serve", "infer.serve.commands", "serve OpenAI's protocol over HTTP"),
    "tune": Program("infer.tune", "infer.tune.commands", "choose the options of a method"),
    "convert": Program("infer.convert", "infer.convert", "convert or quantize a checkpoint"),
    "lm-eval": Program(
        "infer.lm_eval", "infer.lm_eval.__main__", "run lm-evaluation-harness's tasks"
    ),
    "code-task": Program(
        "infer.code_task", "infer.code_task", "make a task of constrained code for tune and bench"
    ),
    "train-lm": Program("train.lm", "train.lm.__main__", "pre-train a model, or distill a draft"),
    "train-sdsat": Program(
        "train.sdsat", "train.sdsat.__main__", "tune a model to draft for itself"
    ),
    "train-head": Program(
        "train.head", "train.head.__main__", "train an EAGLE-3 head for a target"
    ),
    "train-states": Program(
        "train.states", "train.states", "store a target's hidden states for train-head"
    ),
    "train-tokens": Program(
        "train.tokens", "train.tokens", "tokenize a corpus that does not fit in memory"
    ),
    "train-answers": Program(
        "train.answers", "train.answers.__main__", "let a target answer conversations"
    ),
    "train-ablation": Program("train.ablation", "train.ablation", "compare SDSAT's variants"),
}


def main() -> int:
    """Starts the program that the command line names; returns its exit code."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    program = PROGRAMS.get(name)
    if program is None:
        _parser().parse_args()  # --help and --version end here, and so does a wrong name
        return BAD_INPUT
    stranger = shadow(program.module.partition(".")[0])
    if stranger is not None:
        say(COMMAND, stranger)
        return BAD_INPUT
    sys.argv = [f"{COMMAND} {name}", *sys.argv[2:]]
    return pkgutil.resolve_name(f"{program.main}:main")()


def program() -> NoReturn:
    """The command's entry point, which ends the process."""
    start(main)


def shadow(package: str) -> str | None:
    """Says which file Python would import instead of our ``package``; None if it finds ours.

    Args:
      package: ``infer`` or ``train``, which is not imported here.
    """
    ours = Path(__file__).parents[1] / package / "__init__.py"
    found = importlib.util.find_spec(package)
    if found is None:
        return f"the package {package!r} is not installed beside {Path(__file__).parent}"
    if found.origin is not None and os.path.realpath(found.origin) == os.path.realpath(ours):
        return None
    file = found.origin or next(iter(found.submodule_search_locations or ()))
    return (
        f"{file} hides specjax's package {package!r}: rename it, or take its folder from "
        "PYTHONPATH; the command `specjax` does not search the working directory, and "
        "`python -m` does"
    )


def _parser() -> Parser:
    """The parser of a command line that names no program."""
    lines = [f"  {name:<16}{program.text}" for name, program in PROGRAMS.items()]
    doc = "Speculative decoding for JAX.\n\nprograms (specjax PROGRAM --help):\n" + "\n".join(lines)
    parser = Parser(COMMAND, doc)
    parser.prog = COMMAND
    parser.add_argument(
        "program",
        choices=list(PROGRAMS),
        metavar="PROGRAM",
        help="one of the list, and its options",
    )
    return parser


if __name__ == "__main__":
    program()
