"""The terminal: streamed text coloured by who wrote each token, and a short summary.

Text of models and prompts never passes rich's markup, and control characters are shown
escaped: output cannot move the cursor or restyle the terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specjax.generate import Generation, Piece
from specjax.lm import LM
from specjax.metrics import rates
from specjax.text import IncrementalDecoder
from specjax.types import FROM_DRAFT

DRAFTED, WRITTEN, PROMPT = "bold green", "bold yellow", "dim"


def printable(text: str) -> str:
    """The text with control characters (other than newline and tab) made visible."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


class Screen:
    """Shows one prompt's completion as it streams."""

    def __init__(self, target: LM, stop: Sequence[str]):
        self.console = Console(highlight=False, soft_wrap=True)
        self._target, self._stop = target, stop
        self._colour = self.console.is_terminal
        self._decoder = IncrementalDecoder(target.tokenizer)

    def prompt(self, text: str) -> None:
        """The prompt, dimmed, only where there is a terminal."""
        if self._colour:
            self.console.print(Text(printable(text), style=PROMPT), end="")

    def piece(self, piece: Piece) -> None:
        """New tokens; a stop string may have cut the text, then its colours are dropped."""
        if not self._colour or self._stop:
            self.console.print(Text(printable(piece.text)), end="")
            return
        for token, origin in zip(piece.tokens, piece.origins, strict=True):
            text = self._decoder.push([token])
            self._print(text, DRAFTED if origin == FROM_DRAFT else WRITTEN)
        if piece.finish_reason:
            self._print(self._decoder.flush(), WRITTEN)

    def _print(self, text: str, style: str) -> None:
        if text:
            self.console.print(Text(printable(text), style=style), end="")

    def end(self) -> None:
        """Ends one completion's text."""
        self.console.print()

    def summary(self, generation: Generation, method: str) -> None:
        """Speed, acceptance and the legend of colours; only where there is a terminal."""
        self.end()
        if not self._colour:
            return
        counters = {name: values.sum() for name, values in generation.stats.items()}
        found = rates(counters)
        seconds = float(generation.decode_seconds.max())
        table = Table.grid(padding=(0, 2))
        table.add_row("method", method)
        speed = f"{counters['emitted']} in {seconds:.2f} s = {counters['emitted'] / seconds:.0f}/s"
        table.add_row("tokens", f"{speed}, {generation.finish_reasons[0]}")
        table.add_row(
            "rounds", f"{counters['rounds']}, {found['block_efficiency']:.2f} tokens each"
        )
        if found["acceptance_rate"] is not None:
            share = f"{found['acceptance_rate']:.0%} of {counters['tested']} tested draft tokens"
            table.add_row("accepted", share)
        self.console.rule(style="dim")
        self.console.print(table)
        if counters["drafted"]:
            legend = Text("colours  ").append("accepted draft", DRAFTED)
            self.console.print(legend.append(" · ").append("target", WRITTEN))


class Compiling:
    """Says on stderr, while nothing has come yet, that the first run compiles."""

    def __init__(self, enabled: bool):
        self._console = Console(stderr=True)
        self._status = None
        self._began = time.perf_counter()
        if enabled and self._console.is_terminal:
            self._status = self._console.status("compiling (first run only; later starts reuse it)")
            self._status.start()
        elif enabled:
            print("compiling (first run only; later starts reuse it)", file=sys.stderr, flush=True)

    def done(self) -> None:
        if self._status:
            self._status.stop()
            self._status = None


def method_table(console: Console) -> None:
    """``--list-methods``: the methods, then the parts that compose."""
    from specjax.methods import DRAFTERS, METHODS, RULES, TARGET_DISTS

    table = Table("method", "lossless", "what it does", "options", "from")
    for spec in METHODS.values():
        options = ", ".join(f"{n}={o.default}" for n, o in spec.options.items())
        table.add_row(
            spec.name, "yes" if spec.lossless else "no", spec.summary, options, spec.paper
        )
    console.print(table)
    for title, parts in (
        ("--drafter", DRAFTERS),
        ("--rule", RULES),
        ("--target-dist", TARGET_DISTS),
    ):
        rows = Table(title, "what it is", "options")
        for name, part in parts.items():
            options = ", ".join(f"{n}={o.default}" for n, o in part.options.items())
            rows.add_row(name, part.summary, options)
        console.print(rows)
