"""SDSAT: fine-tunes a checkpoint to draft for itself with adaptive tokens.

python -m train.sdsat CONFIG.toml [--set section.key=value ...] [--resume] [--dry-run] [--json]
    [--distributed HOST:PORT,COUNT,INDEX]
"""

from collections.abc import Sequence

from specjax.program import Place, run, start
from train.cli import run_parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = run_parser("train.sdsat", __doc__)
    parser.add_argument(
        "--distributed",
        metavar=Place.FORM,
        help="one of COUNT processes that meet at process 0's address; "
        "cluster: as the cluster manager says",
    )
    return run("train.sdsat", "train.sdsat.training:run", parser.parse_args(argv))


if __name__ == "__main__":
    start(main)
