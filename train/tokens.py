"""Tokenizes the corpus of a training config into data.shards, in parallel and restartable.

python -m train.tokens CONFIG.toml [--set section.key=value ...] [--processes N] [--json]

The programs that train do it by themselves; ahead of them it needs no accelerator.
"""

from collections.abc import Sequence

from specjax._util.program import run, start
from train.cli import config_parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = config_parser("train.tokens", __doc__)
    said = "that tokenize; by default one for each core"
    parser.add_argument("--processes", type=int, default=0, metavar="N", help=said)
    parser.add_argument("--json", action="store_true", help="print the manifest as one object")
    return run("train.tokens", "train.tokenizing:run", parser.parse_args(argv))


if __name__ == "__main__":
    start(main)
