"""SDSAT: fine-tunes a checkpoint to draft for itself with adaptive tokens.

python -m train.sdsat CONFIG.toml [--set section.key=value ...] [--resume] [--dry-run] [--json]
    [--distributed HOST:PORT,COUNT,INDEX]
"""

from collections.abc import Sequence

from specjax._util.program import run, start
from train.cli import run_parser


def main(argv: Sequence[str] | None = None) -> int:
    args = run_parser("train.sdsat", __doc__).parse_args(argv)
    return run("train.sdsat", "train.sdsat.training:run", args)


if __name__ == "__main__":
    start(main)
