"""What the methods decode: prompts, and what their completions are judged by."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from infer.datasets.table import Source
from infer.prompts import BadLine, Prompt, PromptEncoder, read_prompts, references_of, report
from specjax._util.errors import OptionError
from specjax._util.program import say
from specjax.demo.heldout import held_out_functions


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt, and what its completion is judged by."""

    tokens: list[int]
    references: tuple[str, ...] = ()
    task: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the file's object
    text: str = ""  # the prompt as metrics read it


def read_questions(args: argparse.Namespace, encoder: PromptEncoder) -> tuple[list[Question], int]:
    """From the file, the held-out functions, or random tokens for random weights.

    Also how many prompts were left out, each of which is reported.

    Raises:
      OptionError: no prompt is left.
    """
    target = encoder.target
    if target.tokenizer is None:
        generator = np.random.Generator(np.random.Philox(0))
        tokens = generator.integers(5, target.config.vocab_size, (args.num_prompts, 96))
        return [Question(row) for row in tokens.tolist()], 0
    path = args.prompts or "held-out functions"
    if args.prompts:
        source = Source(args.dataset) if args.dataset else None
        wanted, bad = read_prompts(path, encoder, source=source, most=args.num_prompts)
    else:
        wanted, bad = _held_out(args.num_prompts, encoder)
    report("infer.bench", wanted, bad, path)
    if not wanted:
        raise OptionError(f"{path}: no prompt is left to measure")
    questions = [Question(p.tokens, references_of(p.entry), p.entry, p.text) for p in wanted]
    return questions, len(bad)


def _held_out(count: int, encoder: PromptEncoder) -> tuple[list[Prompt], list[BadLine]]:
    """Functions of the standard library up to their bodies, which are the references."""
    functions, warnings = held_out_functions(count)
    for warning in warnings:
        say("infer.bench", warning)
    good, bad = [], []
    for i, function in enumerate(functions):
        try:
            tokens, cut = encoder.text(function.prompt)
        except OptionError as error:
            bad.append(BadLine(i + 1, str(error)))
            continue
        entry = {"reference": function.reference}
        good.append(Prompt(i, i, function.prompt, tokens, entry, cut=cut))
    return good, bad
