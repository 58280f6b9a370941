"""What the methods decode: a ``Question`` is a prompt with what its completion is scored by."""

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

RANDOM_TOKENS = 96  # of a prompt of random tokens
FIRST_RANDOM_ID = 5  # special tokens usually have the ids below


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt, and what its completion is scored against."""

    tokens: list[int]
    references: tuple[str, ...] = ()
    task: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # its object in the file
    text: str = ""  # the prompt as metrics read it


class NoPromptError(OptionError):
    """No line of the prompts' file can be measured."""


def read_questions(args: argparse.Namespace, encoder: PromptEncoder) -> tuple[list[Question], int]:
    """Reads the prompts: from the file, the held-out functions, or random tokens.

    Random weights have no tokenizer, so their prompts are random tokens.

    Returns:
      The questions, and how many prompts were left out. Each of those is reported on stderr.
    Raises:
      NoPromptError: no prompt of the file is left.
      OptionError: no held-out function is left.
    """
    target = encoder.target
    if target.tokenizer is None:
        generator = np.random.Generator(np.random.Philox(0))
        shape = (args.num_prompts, RANDOM_TOKENS)
        tokens = generator.integers(FIRST_RANDOM_ID, target.config.vocab_size, shape)
        return [Question(row) for row in tokens.tolist()], 0

    if args.prompts:
        path = args.prompts
        source = Source(args.dataset) if args.dataset else None
        prompts, bad = read_prompts(path, encoder, source=source, most=args.num_prompts)
    else:
        path = "held-out functions"
        prompts, bad = _held_out(args.num_prompts, encoder)
    report("infer.bench", prompts, bad, path)
    if not prompts:
        error = NoPromptError if args.prompts else OptionError
        raise error(f"{path}: no prompt is left to measure")
    questions = [Question(p.tokens, references_of(p.entry), p.entry, p.text) for p in prompts]
    return questions, len(bad)


def _held_out(count: int, encoder: PromptEncoder) -> tuple[list[Prompt], list[BadLine]]:
    """Functions of the standard library, cut before their bodies; the body is the reference."""
    functions, warnings = held_out_functions(count)
    for warning in warnings:
        say("infer.bench", warning)
    prompts = []
    bad = []
    for i, function in enumerate(functions):
        try:
            tokens, cut = encoder.text(function.prompt)
        except OptionError as error:
            bad.append(BadLine(i + 1, str(error)))
            continue
        entry = {"reference": function.reference}
        prompts.append(Prompt(i, i, function.prompt, tokens, entry, cut=cut))
    return prompts, bad
