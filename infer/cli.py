"""Arguments that the inference programs share.

Values are checked while they are parsed. The library checks them again, but importing it takes
seconds, and a wrong argument should be reported at once.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from infer.datasets.table import DATASETS

# The programs read the shared arguments from here, too.
from specjax._util.appending import may_begin
from specjax._util.command_line import (  # noqa: F401
    MAX_ROWS,
    MESH_AXES,
    REPEATABLE,
    SELF,
    add_devices,
    add_models,
    add_seed,
    checked,
    draft,
    mesh_axes,
    place,
    quantization,
    scheme,
    seed,
    setting,
    temperature,
    top_p,
    whole,
    wrong_value,
)
from specjax._util.errors import OptionError
from specjax._util.files import read_file
from specjax._util.program import (  # noqa: F401
    BY_CLUSTER,
    Parser,
    Place,
    any_text,
    name_or_path,
)

MAX_VALUES = 1000  # of an option in a sweep or a grid, and points of the grid
BAD_LINES = 3  # the exit code if some input lines were bad
NEW_TOKENS = 128  # the default of --max-new-tokens


def add_prompting(group: argparse._ActionsContainer) -> None:
    """Adds ``--chat --truncate`` to a parser or an argument group."""
    add_chat(group)
    group.add_argument(
        "--truncate",
        choices=["left"],
        help="left: cut the beginning of prompts that are too long, but keep BOS; room for "
        "--max-new-tokens remains. Infilling prompts are never cut (default: refuse long prompts)",
    )


def add_prefixes(group: argparse._ActionsContainer) -> None:
    """Adds ``--prefixes`` to a parser or an argument group."""
    group.add_argument(
        "--prefixes",
        type=whole(0, MAX_ROWS),
        default=4,
        metavar="N",
        help="size of the prefix cache in prompts; each takes the memory of a row (default: "
        "%(default)s)",
    )


def add_sampling(group: argparse._ActionsContainer, of_model: bool = False) -> None:
    """Adds ``--temperature --top-k --top-p --seed`` to a parser or an argument group.

    With ``of_model``, what is not given is None: :func:`infer.loading.chosen_sampling` takes it
    from the model. ``--ignore-generation-config`` is added, too.
    """

    def default(neutral: str) -> str:
        if of_model:
            return f"(default: the model's own, else {neutral})"
        return "(default: %(default)g)"

    group.add_argument(
        "--temperature",
        type=temperature,
        default=None if of_model else 0.0,
        metavar="T",
        help=f"sampling temperature; 0 is greedy decoding {default('0')}",
    )
    group.add_argument(
        "--top-k",
        type=whole(0),
        default=None if of_model else 0,
        metavar="K",
        help=f"sample from the K most likely tokens; 0 is off {default('0')}",
    )
    group.add_argument(
        "--top-p",
        type=top_p,
        default=None if of_model else 1.0,
        metavar="P",
        help="sample from the smallest set of tokens with total probability P; 1 is off "
        f"{default('1')}",
    )
    if of_model:
        add_generation_config(group)
    add_seed(group)


def add_generation_config(group: argparse._ActionsContainer) -> None:
    """Adds ``--ignore-generation-config`` to a parser or an argument group."""
    group.add_argument(
        "--ignore-generation-config",
        action="store_true",
        help="take no sampling settings from the model's generation_config.json; its ends of "
        "sequence always count",
    )


def add_dataset(group: argparse._ActionsContainer) -> None:
    """Adds ``--dataset`` to a parser or an argument group."""
    group.add_argument(
        "--dataset",
        choices=list(DATASETS),
        metavar="NAME",
        help="read the file of prompts as this dataset, in the form that its authors publish: "
        f"{', '.join(DATASETS)}",
    )


def add_new_tokens(group: argparse._ActionsContainer) -> None:
    """Adds ``--max-new-tokens``; :func:`set_new_tokens` sets its default after parsing."""
    group.add_argument(
        "--max-new-tokens",
        type=whole(1),
        metavar="N",
        help=f"longest completion in tokens (default: {NEW_TOKENS}, or what --dataset sets)",
    )


def set_new_tokens(args: argparse.Namespace) -> None:
    """Sets ``--max-new-tokens`` to its default, which depends on ``--dataset``."""
    if args.max_new_tokens is None:
        args.max_new_tokens = DATASETS[args.dataset].new_tokens if args.dataset else NEW_TOKENS


def add_chat(group: argparse._ActionsContainer) -> None:
    """Adds ``--chat`` to a parser or an argument group."""
    group.add_argument(
        "--chat", action="store_true", help="format prompts with the model's chat template"
    )


def add_stop(group: argparse._ActionsContainer) -> None:
    """Adds ``--stop`` to a parser or an argument group."""
    group.add_argument(
        "--stop",
        type=some_text,
        metavar="TEXT",
        help="end a completion before this text; repeatable",
        **REPEATABLE,
    )


def add_distributed(group: argparse._ActionsContainer, text: str) -> None:
    """Adds ``--distributed --meeting-timeout`` to a parser or an argument group.

    ``text`` says what the processes share.
    """
    group.add_argument("--distributed", type=place, metavar=Place.FORM, help=text)
    group.add_argument(
        "--meeting-timeout",
        type=checked(float, "a number of seconds above 0", lambda s: 0 < s < 1e6),
        default=300.0,
        metavar="SECONDS",
        help="how long the processes of one model wait for each other (default: %(default)g)",
    )


def mesh_text(mesh: Mapping[str, int]) -> str:
    """A mesh in the form of ``--mesh``."""
    return ",".join(f"{axis}={count}" for axis, count in mesh.items())


def some_text(text: str) -> str:
    """An argparse type: text that is not empty and valid Unicode.

    :func:`specjax._util.program.name_or_path` is for names and paths.
    """
    if not text:
        raise argparse.ArgumentTypeError("it is empty; give at least one character")
    return any_text(text)


def path(text: str) -> Path:
    """An argparse type: a path."""
    return Path(name_or_path(text))


def sweep(text: str) -> tuple[str, list[str]]:
    """An argparse type: an option and its values.

    The forms are ``gamma=1..8``, ``tau=0,0.1,0.3`` and, for values with commas,
    ``branching=4,2,2;2,2``.
    """
    name, _, values = text.partition("=")
    first, is_range, last = values.partition("..")
    if is_range:
        try:
            numbers = range(int(first), int(last) + 1)
        except ValueError:
            numbers = range(0)
        listed = list(map(str, numbers[: MAX_VALUES + 1]))
    else:
        separator = ";" if ";" in values else ","
        listed = [value.strip() for value in values.split(separator)]

    if not name.strip() or not listed or not all(listed):
        raise wrong_value(text, "OPTION=A..B or OPTION=A,B,…, e.g. gamma=1..8")
    if len(listed) > MAX_VALUES:
        raise wrong_value(text, f"at most {MAX_VALUES} values")
    return name.strip().replace("-", "_"), listed


def check_grid(options: str, values: Sequence[Sequence]) -> None:
    """Refuses a grid with more points than anyone measures, before it fills the memory.

    Args:
      options: the options that give the grid.
      values: of each option in it.
    Raises:
      OptionError: it has more than ``MAX_VALUES`` points.
    """
    points = math.prod(map(len, values))
    if points > MAX_VALUES:
        raise OptionError(f"{options}: a grid of {points:,} points; expected at most {MAX_VALUES}")


def check_results(path: Path, begin: str) -> None:
    """Checks that a file of results in ``--out`` is this program's, if it is there.

    Programs call it before they measure: they append to such a file, or begin it anew.

    Raises:
      OptionError: a line does not begin as the program's, and was not cut off before that. Or the
        file cannot be read.
    """
    try:
        lines = read_file(path).split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise OptionError(f"--out {path}: cannot be read ({error.strerror})") from None
    for number, line in enumerate(lines, 1):
        if not may_begin(line, begin):
            raise OptionError(
                f"--out {path}: line {number} is no result of this program; choose "
                "another directory"
            )


def make_directory(out: str, option: str = "--out") -> Path:
    """Makes the directory that an option names, and checks that it can be written.

    Programs call it first, so that a wrong path does not cost a measurement.

    Raises:
      OptionError: it cannot be made or written.
    """
    directory = Path(out)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError as error:
        raise OptionError(f"{option} {out}: cannot be written ({error.strerror})") from None
