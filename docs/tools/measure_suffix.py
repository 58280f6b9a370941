"""Suffix drafts beside lookup drafts on forty edits: python docs/tools/measure_suffix.py

A prompt is a function of the standard library, a comment that asks for other variable names, and
the new function's first line. ``written`` is a target that writes exactly the function with its
variables renamed. ``demo`` is the embedded target, greedy, which writes what it likes. It prints
tokens per pass, with one pass per round, and writes them to docs/figures/suffix.json.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from specjax._util.files import write_text
from specjax.core.protocols import Drafter
from specjax.demo.heldout import held_out_functions
from specjax.draft import Lookup, Suffix

FIGURES = Path(__file__).parents[1] / "figures" / "suffix.json"
NAMES = ("first", "second", "entry", "amount", "where", "label", "piece", "result", "group")
RENAMED = 2  # variables of each function
COUNT, BATCH, NEW_TOKENS = 40, 8, 160


class Edit(NamedTuple):
    """A prompt, and what a target that obeys it writes."""

    prompt: str
    text: str


def edits(count: int) -> list[Edit]:
    """The first held-out functions whose variables can be renamed, each as an edit."""
    functions = held_out_functions()[0]
    made = (edit(textwrap.dedent(function.source)) for function in functions)
    return [one for one in made if one][:count]


def edit(source: str) -> Edit | None:
    """The function with its two commonest variables renamed; None if it has fewer."""
    nodes = list(ast.walk(ast.parse(source)))
    own = {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    words = re.findall(r"\w+", source)
    old = sorted(own - {"self", "cls", *dir(builtins)}, key=lambda name: (-words.count(name), name))
    new = dict(zip(old[:RENAMED], (name for name in NAMES if name not in words), strict=False))
    if len(new) < RENAMED:
        return None
    renamed = re.sub(r"\w+", lambda word: new.get(word[0], word[0]), source)
    asked = " and ".join(f"{a} to {b}" for a, b in new.items())
    head, body = renamed.split("\n", 1)
    return Edit(f"{source}\n\n# The same function, {asked} renamed:\n{head}", f"\n{body}")


def replay(drafter: Drafter, rows: list[tuple[list[int], list[int]]], batch: int) -> float:
    """Tokens per pass of a drafter for a target that writes each row's second part.

    The rows come in batches, as the prompts of a job do.
    """
    capacity = max(len(a) + len(b) for a, b in rows)
    inputs = SimpleNamespace(is_eos=lambda tokens: tokens < 0)

    @jax.jit
    def begin(tokens, length, before):
        state = _state(tokens, length, ())
        if before:
            return drafter.on_slot_reuse(_state(tokens, length, before), state)
        return drafter.init(inputs, state)

    @jax.jit
    def play(tokens, length, whole, drafted):
        state = _state(
            jnp.where(jnp.arange(capacity) < length[:, None], tokens, 0), length, drafted
        )
        state.done = length >= whole
        proposal = drafter.propose(inputs, state, None)
        draft, drafted = proposal.draft, proposal.state
        at = jnp.minimum(length[:, None] + jnp.arange(drafter.gamma), capacity - 1)
        right = (jnp.take_along_axis(tokens, at, axis=1) == draft.tokens[:, 1:]) & draft.valid[
            :, 1:
        ]
        gained = jnp.cumprod(right, axis=1).sum(1) + 1
        return jnp.where(state.done, length, jnp.minimum(length + gained, whole)), drafted

    passes, drafted = 0, ()
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        tokens = np.zeros((batch, capacity), np.int32)
        for row, (given, written) in enumerate(part):
            tokens[row, : len(given) + len(written)] = given + written
        length = jnp.asarray([len(a) for a, _ in part], jnp.int32)
        whole = jnp.asarray([len(a) + len(b) for a, b in part], jnp.int32)
        drafted = begin(tokens, length, drafted)
        while (length < whole).any():
            passes += int((length < whole).sum())
            length, drafted = play(tokens, length, whole, drafted)
    return sum(len(b) for _, b in rows) / passes


def _state(tokens, length, drafted) -> SimpleNamespace:
    done = jnp.zeros(length.shape, bool)
    capacity = tokens.shape[1]
    return SimpleNamespace(
        tokens=tokens, length=length, capacity=capacity, done=done, drafter_state=drafted
    )


def decoded(target: sj.LM, prompts: list[list[int]], method: str) -> float:
    """Tokens per pass of the embedded target."""
    out = sj.generate(target, prompts, method=method, max_new_tokens=NEW_TOKENS, batch_size=BATCH)
    return float(out.stats["emitted"].sum() / out.stats["target_calls"].sum())


def main() -> None:
    """Measures, prints and writes."""
    target = sj.load("demo")
    encode = target.tokenizer.encode
    rows = [tuple(np.asarray(encode(text)).tolist() for text in one) for one in edits(COUNT)]
    drafters = {"lookup": Lookup(), "suffix": Suffix()}
    figures = {
        "command": "python docs/tools/measure_suffix.py",
        "edits": len(rows),
        "mean_tokens": [float(np.mean([len(row[part]) for row in rows])) for part in (0, 1)],
        "written": {name: replay(drafter, rows, BATCH) for name, drafter in drafters.items()},
        "written_one_by_one": {name: replay(drafters[name], rows, 1) for name in drafters},
        "demo": {name: decoded(target, [row[0] for row in rows], name) for name in drafters},
    }
    text = json.dumps(figures, indent=1) + "\n"
    print(text, end="")
    write_text(FIGURES, text)


if __name__ == "__main__":
    main()
