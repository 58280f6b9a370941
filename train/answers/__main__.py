"""Lets a target answer conversations, as training data for a head, a draft or adaptive tokens.

  python -m train.answers IN.jsonl OUT.jsonl --target DIR
  python -m train.answers OUT.jsonl --own 10000 --target DIR

IN has conversations in any form that training reads, and may be a folder or hf:NAME[:SPLIT]. The
answers in it are dropped: each turn is answered after the model's own earlier answers. With --own
the model also writes what the user says, so that no data set is needed. A killed job goes on when
it is started again, and writes the same file.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from specjax._util.command_line import (
    MAX_ROWS,
    REPEATABLE,
    add_devices,
    add_models,
    add_seed,
    checked,
    setting,
    temperature,
    whole,
    wrong_value,
)
from specjax._util.program import Parser, Place, name_or_path, run, start
from train.cli import new_file

NAME = "train.answers"


def mixture(text: str) -> dict[float, float]:
    """An argparse type: T, or T=SHARE,…; returns the shares by temperature."""
    shares: dict[float, float] = {}
    for part in text.split(","):
        value, _, share = part.partition("=")
        try:
            weight = float(share or 1)
        except ValueError:
            weight = 0.0
        if not 0 < weight < 1e9:
            raise wrong_value(text, "T, or T=SHARE,… with shares above 0, as in 0=3,1=1")
        shares[temperature(value)] = weight
    return shares


def parser() -> Parser:
    """The command line."""
    out = Parser(NAME, __doc__)
    out.add_argument(
        "paths",
        nargs="+",
        metavar="FILE",
        help="input files of conversations, then the output file (with --own only the output file)",
    )
    add_models(out)
    group = out.add_argument_group("questions")
    group.add_argument(
        "--own",
        type=whole(1),
        metavar="N",
        help="the model also writes the N questions, sampled after an empty user turn (Magpie)",
    )
    group.add_argument(
        "--openings",
        type=name_or_path,
        metavar="FILE",
        help="of --own: how questions begin, one a line (default: a list of its own)",
    )
    group.add_argument(
        "--chat-template",
        type=name_or_path,
        metavar="FILE",
        help="a Jinja file to use instead of the target's chat template",
    )
    _add_decoding(out)
    devices = add_devices(out)
    devices.add_argument(
        "--distributed",
        type=checked(Place.parse, f"{Place.FORM}, INDEX from 0 to COUNT - 1"),
        metavar=Place.FORM,
        help="run as process INDEX of COUNT: each answers its share of the questions",
    )
    return out


def _add_decoding(out: Parser) -> None:
    group = out.add_argument_group("decoding")
    group.add_argument(
        "--method",
        metavar="NAME",
        help="decoding method (default: speculative with a draft, else autoregressive)",
    )
    group.add_argument(
        "--set",
        type=setting,
        metavar="OPTION=VALUE",
        help="set an option of the method; repeatable",
        **REPEATABLE,
    )
    group.add_argument(
        "--temperature",
        type=mixture,
        default={0.0: 1.0},
        metavar="T|T=SHARE,…",
        help="temperature of the answers (default: 0); 0=3,1=1 decodes three of four "
        "conversations greedily and one at 1",
    )
    group.add_argument(
        "--max-new-tokens",
        type=whole(1),
        default=512,
        metavar="N",
        help="longest answer in tokens (default: %(default)s)",
    )
    group.add_argument(
        "--batch-size",
        type=whole(1, MAX_ROWS),
        default=32,
        metavar="B",
        help="conversations answered at the same time (default: %(default)s)",
    )
    add_seed(group)
    group.add_argument(
        "--repeats",
        choices=["keep", "drop"],
        default="keep",
        help="drop: leave out answers that repeat themselves to the limit (default: keep)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    commands = parser()
    args = commands.parse_args(argv)
    *args.files, out = args.paths
    try:
        args.out = new_file(out)
    except argparse.ArgumentTypeError as error:
        commands.error(str(error))
    if bool(args.files) == (args.own is not None):
        commands.error("give IN and OUT, or OUT and --own N")
    if args.openings and args.own is None:
        commands.error("--openings has no effect without --own")
    return run(NAME, "train.answers.job:answer", args)


if __name__ == "__main__":
    start(main)
