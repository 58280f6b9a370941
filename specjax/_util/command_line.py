"""Arguments that the programs of ``infer`` and ``train`` share.

Values are checked while they are parsed. The library checks them again, but importing it takes
seconds, and a wrong argument should be reported at once.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import TypeVar

from specjax._util.checks import INT32_MAX, SEED_MAX
from specjax._util.program import BY_CLUSTER, Parser, Place, name_or_path

MAX_ROWS = 2**16  # samples of a prompt, or rows of a batch: all their random keys are in memory
MESH_AXES = ("data", "model")
REPEATABLE = {"action": "append", "default": []}  # argparse's way to collect values in a list

Value = TypeVar("Value")


def add_models(parser: Parser) -> None:
    """Adds ``--target --draft --base --dtype --quantize --cache-dtype --pass-width --pickles``."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target",
        default="demo",
        metavar="PATH|ID|demo",
        help="target model: a directory, a Hugging Face id (ID@REV: a revision of it), or the "
        "embedded demo (default)",
    )
    group.add_argument(
        "--draft",
        type=draft,
        metavar="PATH|ID|demo|self:SCHEME",
        help="draft model, or a draft head; self:int8, self:fp8 and self:int4 draft with a "
        "quantized copy of the target (default: none; the demo target has its own)",
    )
    group.add_argument(
        "--base",
        metavar="DIR",
        help="of a delta: the model that it was made for, if it is not where the delta says",
    )
    _add_forms(group)


def _add_forms(group: argparse._ArgumentGroup) -> None:
    """The form of weights, cache and passes."""
    group.add_argument(
        "--dtype",
        metavar="D",
        help="dtype of weights and activations: float32, bfloat16 or float16 (default: float32 "
        "on CPUs, bfloat16 on accelerators)",
    )
    group.add_argument(
        "--quantize",
        type=quantization,
        metavar="SCHEME",
        help="quantize the weights: int8, fp8, int4 or int4:GROUP (GROUP inputs share a scale); "
        "none: dequantize weights that another library quantized (default: as they are stored)",
    )
    group.add_argument(
        "--cache-dtype",
        choices=["int8"],
        help="quantize the KV cache to int8: half the memory of bfloat16 (default: the dtype of "
        "the weights)",
    )
    group.add_argument(
        "--pass-width",
        type=whole(1, 128),
        metavar="N",
        help="pad short passes to N tokens per row (default: 8 on accelerators, where padding is "
        "free, else 1). With chains shorter than N and at most 128/N rows, greedy bfloat16 text "
        "is plain decoding's; with trees it may differ",
    )
    group.add_argument(
        "--pickles",
        action="store_true",
        help="allow pytorch_model*.bin for checkpoints without safetensors; needs torch, and "
        "loads tensors only",
    )


def add_devices(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds a group with ``--mesh --draft-whole``, and returns it."""
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--mesh",
        type=mesh_axes,
        metavar="AXIS=N,...",
        help="use several devices: data=N splits the batch, model=N splits the models",
    )
    group.add_argument(
        "--draft-whole",
        action="store_true",
        help="each device of --mesh has the whole draft: no sums between devices, more memory "
        "(default: only where it cannot be split)",
    )
    return group


def add_seed(group: argparse._ActionsContainer) -> None:
    """Adds ``--seed`` to a parser or an argument group."""
    group.add_argument(
        "--seed",
        type=seed,
        default=0,
        metavar="S",
        help="seed of the random numbers; the same seed gives the same text (default: %(default)s)",
    )


def wrong_value(text: str, expected: str) -> argparse.ArgumentTypeError:
    """The error that an argparse type raises."""
    return argparse.ArgumentTypeError(f"{text}: expected {expected}")


def checked(
    kind: Callable[[str], Value],
    expected: str,
    fits: Callable[[Value], object] = lambda value: True,
) -> Callable[[str], Value]:
    """An argparse type: ``kind`` parses the text, and ``fits`` says if the value is allowed.

    ``expected`` describes allowed values in the error message.
    """

    def parse(text: str) -> Value:
        try:
            value = kind(text)
        except ValueError:
            raise wrong_value(text, expected) from None
        if not fits(value):
            raise wrong_value(text, expected)
        return value

    return parse


def whole(low: int, high: int = INT32_MAX) -> Callable[[str], int]:
    """An argparse type: a whole number from ``low`` to ``high``."""
    return checked(int, f"a whole number from {low} to {high}", lambda n: low <= n <= high)


seed = whole(0, SEED_MAX)
temperature = checked(float, "a number ≥ 0 (0 is greedy)", lambda t: 0 <= t < math.inf)
top_p = checked(float, "a number above 0 and up to 1 (1 is off)", lambda p: 0 < p <= 1)


SELF = "self:"  # prefix of a draft that is a quantized copy of the target
SCHEME = re.compile(r"int8|fp8|int4(:[0-9]{1,4})?")
scheme = checked(str, "int8, fp8, int4 or int4:GROUP", SCHEME.fullmatch)
quantization = checked(
    str,
    "int8, fp8, int4 or int4:GROUP, or none",
    lambda text: text == "none" or SCHEME.fullmatch(text),
)


def draft(name: str) -> str:
    """An argparse type: a model's name, or self:SCHEME."""
    name_or_path(name)
    if name.startswith(SELF):
        scheme(name.removeprefix(SELF))
    return name


def mesh_axes(text: str) -> dict[str, int]:
    """An argparse type: AXIS=N,…; returns the counts of both axes, ``data`` and ``model``."""
    counts: dict[str, int] = dict.fromkeys(MESH_AXES, 1)
    for part in text.split(","):
        axis, _, count = part.partition("=")
        # At most nine digits: Python refuses to parse very long integers.
        if axis not in counts or not re.fullmatch("[1-9][0-9]{,8}", count):
            raise wrong_value(text, "data=N, model=N or both with a comma between, N at least 1")
        counts[axis] = int(count)
    return counts


def _place(text: str) -> Place | str:
    """:meth:`Place.parse`, or :data:`BY_CLUSTER`."""
    return text if text == BY_CLUSTER else Place.parse(text)


place = checked(_place, f"{Place.FORM}, INDEX from 0 to COUNT - 1, or {BY_CLUSTER}")


def setting(pair: str) -> tuple[str, str]:
    """An argparse type: OPTION=VALUE; returns the pair."""
    name, _, value = pair.partition("=")
    if not name or not value:
        raise wrong_value(repr(pair), "OPTION=VALUE, e.g. --set gamma=3")
    return name.replace("-", "_"), value
