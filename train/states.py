"""Stores a target's hidden states for train.head: training then needs its embedding and LM head.

python -m train.states CONFIG.toml [--set section.key=value ...] [--rows N] [--dry-run] [--json]

The config is one of train.head, with head.states: the directory to fill. It can be killed: the
same command goes on, and makes the same files. --dry-run says how large they will be.
"""

from collections.abc import Sequence

from specjax._util.program import run, start
from train.cli import config_parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = config_parser("train.states", __doc__)
    parser.add_argument(
        "--rows",
        type=int,
        default=0,
        metavar="N",
        help="training rows to store; default: those of the run, but at most one epoch",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    return run("train.states", "train.head.storing:run", parser.parse_args(argv))


if __name__ == "__main__":
    start(main)
