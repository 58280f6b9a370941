"""Arguments that the inference programs share.

Values are checked while they are parsed: the library checks them again, but importing it takes
seconds.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from infer.datasets.table import DATASETS
from specjax._util.checks import INT32_MAX, SEED_MAX
from specjax._util.errors import OptionError
from specjax._util.program import Parser, Place

MOST_ROWS = 2**16  # of a prompt or a batch: each has a key of its own before the first is drawn
MESH_AXES = ("data", "model")
BAD_LINES = 3  # the exit code where some input lines were bad
NEW_TOKENS = 128  # of a completion
REPEATABLE = {"action": "append", "default": []}  # arguments of an option that lists its values

Value = TypeVar("Value")


def add_models(parser: Parser) -> None:
    """``--target --draft --dtype --quantize --cache-dtype --pass-width --pickles``."""
    group = parser.add_argument_group("models")
    said = "the model p: a directory, a hub id, or the embedded demo (default)"
    group.add_argument("--target", default="demo", metavar="PATH|ID|demo", help=said)
    said = "the draft model q, or a head; self:int4 (int8, fp8): the target's own quantized copy"
    group.add_argument("--draft", type=draft, metavar="PATH|ID|demo|self:SCHEME", help=said)
    group.add_argument("--dtype", metavar="D", help="float32, bfloat16 or float16")
    said = "keep the weights as int8, fp8, int4 or int4:GROUP (inputs that share a scale)"
    group.add_argument("--quantize", type=scheme, metavar="SCHEME", help=said)
    said = "keep keys and values so: half the cache of bfloat16 (default: as the weights)"
    group.add_argument("--cache-dtype", choices=["int8"], help=said)
    said = "tokens a row of a narrow pass (default: 8 on accelerators, where they are free, else 1)"
    group.add_argument("--pass-width", type=whole(1, 128), metavar="N", help=said)
    said = "read pytorch_model*.bin where there are no safetensors: tensors alone, through torch"
    group.add_argument("--pickles", action="store_true", help=said)


def add_prompting(group: argparse._ActionsContainer) -> None:
    """``--chat --truncate --mesh``, to a parser or a group of its arguments."""
    add_chat(group)
    said = "left: of a prompt that is too long keep BOS and the last tokens that leave room for "
    said += "--max-new-tokens; middles to fill in are never cut (default: refuse it)"
    group.add_argument("--truncate", choices=["left"], help=said)
    add_mesh(group)


def add_mesh(group: argparse._ActionsContainer) -> None:
    """``--mesh``, to a parser or a group of its arguments."""
    said = "several devices: data=N splits the rows, model=N the models"
    group.add_argument("--mesh", type=mesh_axes, metavar="AXIS=N,...", help=said)


def add_sampling(group: argparse._ActionsContainer) -> None:
    """``--temperature --top-k --top-p --seed``."""
    for name, kind, default, metavar, off in (
        ("--temperature", temperature, 0.0, "T", "0 is greedy"),
        ("--top-k", whole(0), 0, "K", "0 is off"),
        ("--top-p", top_p, 1.0, "P", "1 is off"),
    ):
        said = f"{off} (default: %(default)g)"
        group.add_argument(name, type=kind, default=default, metavar=metavar, help=said)
    group.add_argument("--seed", type=seed, default=0, metavar="S")


def add_dataset(group: argparse._ActionsContainer) -> None:
    """``--dataset``, to a parser or a group of its arguments."""
    said = f"what the file of prompts holds, as its authors publish it: {', '.join(DATASETS)}"
    group.add_argument("--dataset", choices=list(DATASETS), metavar="NAME", help=said)


def add_new_tokens(group: argparse._ActionsContainer) -> None:
    """``--max-new-tokens``, for :func:`settle_new_tokens`."""
    said = f"default: {NEW_TOKENS}, or --dataset's own"
    group.add_argument("--max-new-tokens", type=whole(1), metavar="N", help=said)


def settle_new_tokens(args: argparse.Namespace) -> None:
    """Gives ``--max-new-tokens`` its default."""
    if args.max_new_tokens is None:
        args.max_new_tokens = DATASETS[args.dataset].new_tokens if args.dataset else NEW_TOKENS


def add_chat(group: argparse._ActionsContainer) -> None:
    """``--chat``, to a parser or a group of its arguments."""
    group.add_argument("--chat", action="store_true", help="use the model's chat template")


def add_stop(group: argparse._ActionsContainer) -> None:
    """``--stop``, to a parser or a group of its arguments."""
    said = "ends a completion; repeatable"
    group.add_argument("--stop", type=some_text, metavar="TEXT", help=said, **REPEATABLE)


def unfit(text: str, expected: str) -> argparse.ArgumentTypeError:
    """What an argparse type raises."""
    return argparse.ArgumentTypeError(f"{text}: expected {expected}")


def checked(
    kind: Callable[[str], Value], expected: str, fits: Callable[[Value], bool] = lambda value: True
) -> Callable[[str], Value]:
    """An argparse type: what ``kind`` makes of a text, where that ``fits``."""

    def parse(text: str) -> Value:
        try:
            value = kind(text)
        except ValueError:
            raise unfit(text, expected) from None
        if not fits(value):
            raise unfit(text, expected)
        return value

    return parse


def whole(low: int, high: int = INT32_MAX) -> Callable[[str], int]:
    """An argparse type: a whole number from ``low`` to ``high``."""
    return checked(int, f"a whole number from {low} to {high}", lambda n: low <= n <= high)


seed = whole(0, SEED_MAX)
temperature = checked(float, "a number ≥ 0 (0 is greedy)", lambda t: 0 <= t < math.inf)
top_p = checked(float, "a number above 0 and up to 1 (1 is off)", lambda p: 0 < p <= 1)


SELF = "self:"  # begins the name of a draft that is the target's own copy, by its scheme
scheme = checked(
    str,
    "int8, fp8, int4 or int4:GROUP",
    lambda text: re.fullmatch(r"int8|fp8|int4(:[0-9]{1,4})?", text),
)


def draft(name: str) -> str:
    """An argparse type: a model's name, or self:SCHEME."""
    if name.startswith(SELF):
        scheme(name.removeprefix(SELF))
    return name


def mesh_axes(text: str) -> dict[str, int]:
    """An argparse type: AXIS=N,… with axes ``data`` and ``model``, as counts of both."""
    counts = dict.fromkeys(MESH_AXES, 1)
    for part in text.split(","):
        axis, _, count = part.partition("=")
        # Nine digits: Python has a longest integer, and machines have fewer devices.
        if axis not in counts or not re.fullmatch("[1-9][0-9]{,8}", count):
            raise unfit(text, "data=N, model=N or both with a comma between, N at least 1")
        counts[axis] = int(count)
    return counts


place = checked(Place.parse, f"{Place.FORM}, INDEX from 0 to COUNT - 1")


def mesh_text(mesh: Mapping[str, int]) -> str:
    """A mesh as ``--mesh`` takes it."""
    return ",".join(f"{axis}={count}" for axis, count in mesh.items())


def some_text(text: str) -> str:
    """An argparse type: text, not empty, and valid Unicode (arguments are bytes at heart)."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; give at least one character")
    return any_text(text)


def any_text(text: str) -> str:
    """An argparse type: valid Unicode, maybe empty."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise unfit(ascii(text), "text in UTF-8") from None
    return text


def setting(pair: str) -> tuple[str, str]:
    """An argparse type: OPTION=VALUE, as a pair."""
    name, equals, value = pair.partition("=")
    if not equals or not name:
        raise unfit(repr(pair), "OPTION=VALUE, e.g. --set gamma=3")
    return name.replace("-", "_"), value


def sweep(text: str) -> tuple[str, list[str]]:
    """An argparse type: ``gamma=1..8``, ``tau=0,0.1,0.3`` or ``branching=4,2,2;2,2``, as option
    and values."""
    name, _, values = text.partition("=")
    first, dots, last = values.partition("..")
    try:
        comma = ";" if ";" in values else ","
        listed = range(int(first), int(last) + 1) if dots else values.split(comma)
    except ValueError:
        listed = []
    listed = [str(value).strip() for value in listed]
    if not listed or not all(listed):
        raise unfit(text, "OPTION=A..B or OPTION=A,B,…, e.g. gamma=1..8")
    return name.strip().replace("-", "_"), listed


def make_directory(out: str) -> Path:
    """The directory of ``--out``; made first, so that no measurement is lost to a typing error.

    Raises:
      OptionError: it cannot be made or written.
    """
    home = Path(out)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            return home
    except OSError as error:
        raise OptionError(f"--out {out}: cannot be written ({error.strerror})") from None
