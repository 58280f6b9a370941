"""Draws docs/demo.svg, the README's picture, from a real run: python docs/tools/make_demo.py"""

import re
from pathlib import Path

from rich.console import Console

import specjax as sj
from infer.run.job import DEMO_GAMMA, demo_prompt
from infer.run.screen import Screen

TOKENS, WIDTH = 96, 92


def main() -> None:
    """Records the screen of ``python -m infer.run`` with fewer tokens."""
    target, draft = sj.load("demo"), sj.load("demo-draft")
    console = Console(record=True, force_terminal=True, width=WIDTH, highlight=False)
    screen = Screen(target, console)
    text = demo_prompt()
    screen.prompt(text)
    for piece in sj.stream(
        target,
        text,
        method="speculative",
        draft=draft,
        max_new_tokens=TOKENS,
        options={"gamma": DEMO_GAMMA},
    ):
        if piece.generation is None:
            screen.piece(piece)
        else:
            screen.summary(piece.generation, "speculative")
    svg = console.export_svg(title="python -m infer.run")
    # No font from another server: the reader's own monospace will do.
    svg = re.sub(r"@font-face\s*{.*?}\s*", "", svg, flags=re.S)
    (Path(__file__).parents[1] / "demo.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
