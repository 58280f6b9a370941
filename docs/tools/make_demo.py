"""Draws the README's pictures from real runs: python docs/tools/make_demo.py [NAME]"""

import argparse
import re
import shlex
from pathlib import Path

from rich.console import Console

from infer.loading import use_compilation_cache
from infer.run.commands import arguments
from infer.run.job import make_job, only_prompt

WIDTH = 92
# The arguments of each picture, docs/NAME.svg.
RUNS = {
    "demo": "",
    "smollm2": "--target smollm2 --draft smollm2-head --set gamma=2 --chat "
    '--prompt "Why is the sky blue?" --compare',
}


def main() -> None:
    """Records the screen of ``python -m infer.run``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", choices=RUNS, help="default: all of them")
    name = parser.parse_args().name
    use_compilation_cache()
    for drawn in [name] if name else RUNS:
        draw(drawn, RUNS[drawn])


def draw(name: str, given: str) -> None:
    """Draws the screen of a run with these arguments."""
    job = make_job(arguments(shlex.split(given)))
    console = Console(record=True, force_terminal=True, width=WIDTH, highlight=False)
    job.show(only_prompt(job.args, job.encoder), False, console)
    svg = console.export_svg(title=f"python -m infer.run {given}".strip())
    # Load no font from a server: the reader's monospace font is enough.
    svg = re.sub(r"@font-face\s*{.*?}\s*", "", svg, flags=re.S)
    (Path(__file__).parents[1] / f"{name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
