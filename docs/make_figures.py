"""Draws the figures of docs/pages from runs on the embedded pair: python docs/make_figures.py

Each figure is a sweep of infer.bench.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from infer import bench

FIGURES = Path(__file__).with_name("figures")
COMMON = ["--num-prompts", "12", "--max-new-tokens", "64", "--repeats", "1"]
SWEEPS = {
    "gamma": ["--methods", "speculative,block", "--sweep", "gamma=1..7"],
    "max_kl": ["--methods", "mentored", "--sweep", "max_kl=0,0.01,0.03,0.1,0.3,1"],
    "tau": ["--methods", "mtad", "--sweep", "tau=0,0.03,0.1,0.3,0.6,0.9"],
    "width": ["--methods", "mtad", "--sweep", "width=1,2,4,8"],
    "tau2": ["--methods", "bild", "--sweep", "tau2=0.3,1,2,4"],
}


def main(names: list[str]) -> None:
    """Runs the named sweeps, or all of them."""
    FIGURES.mkdir(exist_ok=True)
    for name in names or SWEEPS:
        with tempfile.TemporaryDirectory() as scratch:
            if code := bench.main([*COMMON, *SWEEPS[name], "--out", scratch]):
                sys.exit(code)
            shutil.copy(Path(scratch) / "sweep.png", FIGURES / f"{name}.png")
            shutil.copy(Path(scratch) / "bench.md", FIGURES / f"{name}.md")


if __name__ == "__main__":
    main(sys.argv[1:])
