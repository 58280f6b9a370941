"""SDSAT's ablation: one start, one budget, one change at a time. Makes a table and Figure 5.

python -m train.ablation CONFIG.toml [--set section.key=value ...] [--only NAME,...]

Each variant is a run of train.sdsat in its own directory below ``run.dir``. The same command
resumes: finished variants are kept, and an interrupted one goes on from its last checkpoint. The
table and the figure show the finished variants.
"""

from collections.abc import Sequence

from specjax._util.program import run, start
from train.cli import config_parser
from train.sdsat.variants import VARIANTS


def main(argv: Sequence[str] | None = None) -> int:
    parser = config_parser("train.ablation", __doc__)
    parser.add_argument("--only", metavar="NAME,…", help=f"run only some of {', '.join(VARIANTS)}")
    return run("train.ablation", "train.sdsat.ablation:run", parser.parse_args(argv))


if __name__ == "__main__":
    start(main)
