"""The terminal: streamed text, colored by who wrote each token, and a short summary.

Text of models and prompts is never read as rich's markup, and control characters are escaped. So a
completion cannot move the cursor or change the terminal's style.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infer.authors import Authors
from infer.run.beside_plain import Comparison
from specjax.core.types import FROM_DRAFT
from specjax.lm import LM
from specjax.metrics import rates, ratio
from specjax.runtime.generate import Generation, Piece

# Styles of accepted draft tokens, of the target's own tokens, and of prompts.
DRAFTED = "bold green"
WRITTEN = "bold yellow"
PROMPT = "dim"

BAR = 40  # characters of the longer bar


def printable(text: str) -> str:
    """The text with control characters (other than newline and tab) made visible."""
    shown = []
    for character in text:
        if character not in "\n\t" and not character.isprintable():
            character = repr(character)[1:-1]
        shown.append(character)
    return "".join(shown)


class Terminal(Console):
    """Standard output. A closed pipe, e.g. after ``| head``, raises BrokenPipeError."""

    def __init__(self):
        super().__init__(highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        raise


class Screen:
    """Shows one prompt's completion as it streams.

    Args:
      prompt: the prompt's token ids.
    """

    def __init__(self, target: LM, prompt: Sequence[int], console: Console | None = None):
        self.console = console or Terminal()
        self.colored = self.console.is_terminal
        self._authors = Authors(target.tokenizer, prompt)
        self._first_tokens = 0  # tokens of the first piece, which the speed leaves out

    def prompt(self, text: str) -> None:
        """Prints the prompt, dimmed; only on a terminal."""
        if self.colored:
            self.console.print(Text(printable(text), style=PROMPT), end="")

    def piece(self, piece: Piece) -> None:
        """Prints new text."""
        self._first_tokens = self._first_tokens or len(piece.tokens)
        if not self.colored:
            self.console.print(Text(printable(piece.text)), end="")
            return
        for part, author in self._authors.runs(piece):
            style = DRAFTED if author == FROM_DRAFT else WRITTEN
            self.console.print(Text(printable(part), style=style), end="")

    def end(self) -> None:
        """Ends the line of one completion."""
        self.console.print()

    def summary(self, generation: Generation, method: str) -> None:
        """Prints further hypotheses and, on a terminal, speed, acceptance rate and the colors."""
        self.end()
        for number, one in enumerate((generation.hypotheses or [[]])[-1][1:], start=2):
            self.console.print(Text(f"{number}. (score {one.score:.3f}) {printable(one.text)}"))
        if not self.colored:
            return
        counters = {name: values.sum() for name, values in generation.stats.items()}
        self.console.rule(style="dim")
        self.console.print(self._facts(generation, counters, method))
        if counters["drafted"]:
            legend = Text("colors  ").append("accepted draft", DRAFTED)
            self.console.print(legend.append(" · ").append("target", WRITTEN))

    def beside_plain(self, method: str, comparison: Comparison) -> None:
        """Prints both speeds as bars, their ratio, and whether both gave the same tokens."""
        fastest = max(comparison.speed, comparison.plain_speed)
        bars = Table.grid(padding=(0, 2))
        for name, speed, style in (
            (method, comparison.speed, DRAFTED),
            ("plain decoding", comparison.plain_speed, WRITTEN),
        ):
            bar = Text("━" * max(1, round(BAR * speed / fastest)), style)
            bars.add_row(name, f"{speed:.0f} tokens/s", bar)
        self.console.rule(style="dim")
        self.console.print(bars)
        tokens = "the same tokens" if comparison.same else "other tokens"
        ratio = f"{comparison.ratio:.2f} times as fast as plain decoding"
        self.console.print(f"{ratio}, {tokens}")

    def _facts(self, generation: Generation, counters: dict, method: str) -> Table:
        """The summary's lines, each a name and a value."""
        derived = rates(counters)
        ends = ", ".join(dict.fromkeys(generation.finish_reasons))
        facts = Table.grid(padding=(0, 2))
        facts.add_row("method", method)
        facts.add_row("tokens", f"{counters['emitted']}, ended by {ends}")
        facts.add_row("first text", f"after {generation.first_token_seconds[-1]:.2f} s")
        speed = self._speed(generation)
        if speed is not None:
            facts.add_row("speed", f"{speed:.0f} tokens/s after that")
        rounds = f"{counters['rounds']}, {derived['block_efficiency']:.2f} tokens each"
        if counters["drafted"]:
            rounds += f", draft length {derived['draft_length']:.1f}"
        facts.add_row("rounds", rounds)
        if derived["acceptance_rate"] is not None:
            accepted = (
                f"{derived['acceptance_rate']:.0%} of {counters['tested']} tested draft tokens"
            )
            facts.add_row("accepted", accepted)
        if generation.rewards is not None:
            facts.add_row("rewards", ", ".join(f"{score:.2f}" for score in generation.rewards[-1]))
        return facts

    def _speed(self, generation: Generation) -> float | None:
        """Tokens per second of the shown row (the last one), after its first piece.

        The first piece is left out, because a first run compiles until then.
        """
        whole = generation.prefill_seconds[-1] + generation.decode_seconds[-1]
        seconds = whole - generation.first_token_seconds[-1]
        return ratio(len(generation.tokens[-1]) - self._first_tokens, seconds)
