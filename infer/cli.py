"""Arguments that the inference programs share, and their one-line errors."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from specjax.lm import LM

DEMO_DRAFT = "demo-draft"
INT32_MAX = 2**31 - 1  # counts become int32 arrays
MESH_AXES = ("data", "model")
SEED_MAX = 2**32 - 1  # jax.random.key drops or refuses what is above


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line that names the way out."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see --help", file=sys.stderr)
        raise SystemExit(2)


def make_parser(prog: str, doc: str) -> Parser:
    """A parser with ``--version`` and the models' arguments.

    The version comes from the installed metadata: importing the library imports JAX.
    """
    parser = Parser(
        prog=prog,
        description=doc,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"specjax {importlib.metadata.version('specjax')}"
    )
    models = parser.add_argument_group("models")
    models.add_argument(
        "--target",
        default="demo",
        metavar="PATH|ID|demo",
        help="the model p: a directory, a hub id, or the embedded demo (default)",
    )
    models.add_argument("--draft", metavar="PATH|ID|demo", help="the draft model q")
    models.add_argument("--dtype", metavar="D", help="float32, bfloat16 or float16")
    models.add_argument(
        "--pickles",
        action="store_true",
        help="read pytorch_model*.bin where there are no safetensors: tensors alone, through torch",
    )
    return parser


def add_sampling(parser: Parser) -> None:
    """``--temperature --top-k --top-p --seed``."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temperature", type=temperature, default=0.0, metavar="T", help="0 is greedy (default)"
    )
    group.add_argument("--top-k", type=whole(0), default=0, metavar="K", help="0 is off (default)")
    group.add_argument("--top-p", type=top_p, default=1.0, metavar="P", help="1 is off (default)")
    group.add_argument("--seed", type=whole(0, SEED_MAX), default=0, metavar="S")


# Values are checked here, while parsing: importing the library, which checks them again,
# takes seconds.


def whole(low: int, high: int = INT32_MAX) -> Callable[[str], int]:
    """An argparse type: a whole number from ``low`` to ``high``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise _unfit(text, f"a whole number from {low} to {high}")
        return value

    return parse


def temperature(text: str) -> float:
    """An argparse type: a finite number, at least 0."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise _unfit(text, "a number ≥ 0 (0 is greedy)")
    return value


def gibibytes(text: str) -> float:
    """An argparse type: an amount of memory in GiB."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise _unfit(text, "a number of GiB above 0")
    return value


def top_p(text: str) -> float:
    """An argparse type: a probability above 0."""
    value = _number(text)
    if not 0 < value <= 1:
        raise _unfit(text, "a number above 0 and up to 1 (1 is off)")
    return value


def mesh_axes(text: str) -> dict[str, int]:
    """An argparse type: AXIS=N,… with axes ``data`` and ``model``, as counts of both."""
    found = dict.fromkeys(MESH_AXES, 1)
    for part in text.split(","):
        axis, _, count = part.partition("=")
        if axis not in found or not count.isdecimal() or not 0 < int(count) <= INT32_MAX:
            raise _unfit(text, "data=N, model=N or both with a comma between, N at least 1")
        found[axis] = int(count)
    return found


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
        raise _unfit(ascii(text), "text in UTF-8") from None
    return text


def setting(pair: str) -> tuple[str, str]:
    """An argparse type: OPTION=VALUE, as a pair."""
    name, found, value = pair.partition("=")
    if not found or not name:
        raise _unfit(repr(pair), "OPTION=VALUE, e.g. --set gamma=3")
    return name.replace("-", "_"), value


def parse_settings(pairs: Sequence[str]) -> dict[str, str]:
    """``OPTION=VALUE`` texts as a dict.

    Raises:
      OptionError: a pair without ``=``.
    """
    try:
        return dict(map(setting, pairs))
    except argparse.ArgumentTypeError as error:
        from specjax.errors import OptionError

        raise OptionError(f"--set {error}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _unfit(text: str, expected: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text}: expected {expected}")


def load_models(
    args: argparse.Namespace, want_draft: bool, mesh: dict[str, int] | None = None
) -> tuple[LM, LM | None]:
    """The target, and the draft or None; the demo target brings its own draft.

    On a mesh the target is split; a draft that cannot be is whole on each device.

    Raises:
      ModelError: one of them cannot be loaded.
      OptionError: there are not as many devices.
    """
    from specjax import lm
    from specjax.mesh import make_mesh

    draft = args.draft
    if draft == "demo" or (draft is None and args.target == "demo" and want_draft):
        draft = DEMO_DRAFT
    devices = make_mesh(**mesh) if mesh else None
    load = functools.partial(lm.load, dtype=args.dtype, pickles=args.pickles, mesh=devices)
    target = load(args.target)
    if draft is None:
        return target, None
    return target, load(draft, split=devices is None or lm.can_split(draft, devices))


def use_compilation_cache() -> bool:
    """Keeps compiled programs across starts; ``SPECJAX_CACHE_DIR=`` (empty) turns it off.

    Returns whether there is nothing to reuse yet, so that this start will compile.
    """
    import jax

    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = os.environ.get("SPECJAX_CACHE_DIR", str(Path(base) / "specjax" / "xla"))
    if not directory:
        return True
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return not Path(directory).is_dir() or not any(Path(directory).iterdir())
