"""Trains an EAGLE-3 head on a target's hidden states. The target does not change.

python -m train.head CONFIG.toml [--set section.key=value ...] [--resume] [--dry-run] [--json]
    [--distributed HOST:PORT,COUNT,INDEX]
"""

from collections.abc import Sequence

from specjax._util.program import run, start
from train.cli import run_parser


def main(argv: Sequence[str] | None = None) -> int:
    args = run_parser("train.head", __doc__).parse_args(argv)
    return run("train.head", "train.head.training:run", args)


if __name__ == "__main__":
    start(main)
