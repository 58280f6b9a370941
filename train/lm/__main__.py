"""Pre-training, from scratch or from a checkpoint, and distillation of draft models.

python -m train.lm CONFIG.toml [--set section.key=value ...] [--resume] [--dry-run] [--json]
    [--distributed HOST:PORT,COUNT,INDEX]
"""

from collections.abc import Sequence

from specjax._util.program import run, start
from train.cli import run_parser


def main(argv: Sequence[str] | None = None) -> int:
    args = run_parser("train.lm", __doc__).parse_args(argv)
    return run("train.lm", "train.lm.training:run", args)


if __name__ == "__main__":
    start(main)
