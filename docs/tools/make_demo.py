"""Draws docs/demo.svg, the README's picture, from a real run: python docs/tools/make_demo.py"""

import re
from pathlib import Path

from rich.console import Console

from infer.loading import use_compilation_cache
from infer.run.commands import arguments
from infer.run.job import make_job, only_prompt

WIDTH = 92


def main() -> None:
    """Records the screen of ``python -m infer.run``."""
    use_compilation_cache()
    job = make_job(arguments([]))
    console = Console(record=True, force_terminal=True, width=WIDTH, highlight=False)
    job.show(only_prompt(job.args, job.encoder), False, console)
    svg = console.export_svg(title="python -m infer.run")
    # Load no font from a server: the reader's monospace font is enough.
    svg = re.sub(r"@font-face\s*{.*?}\s*", "", svg, flags=re.S)
    (Path(__file__).parents[1] / "demo.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
