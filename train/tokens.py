"""Tokenizes the corpus of a training config into data.shards, in parallel; can be resumed.

python -m train.tokens CONFIG.toml [--set section.key=value ...] [--processes N] [--json]

The training programs do this themselves. To do it ahead of them needs no accelerator.
"""

from collections.abc import Sequence

from specjax._util.program import run, start
from train.cli import config_parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = config_parser("train.tokens", __doc__)
    parser.add_argument(
        "--processes",
        type=int,
        default=0,
        metavar="N",
        help="number of processes that tokenize; default: one for each core",
    )
    parser.add_argument("--json", action="store_true", help="print the manifest as one JSON object")
    return run("train.tokens", "train.tokenizing:run", parser.parse_args(argv))


if __name__ == "__main__":
    start(main)
