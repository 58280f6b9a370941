"""What the methods decode: prompts, and what their completions are judged by."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

import specjax as sj
from infer.bench.sandbox import check_tasks
from infer.prompts import encode, read_prompts
from specjax.demo.heldout import held_out_functions
from specjax.errors import OptionError
from specjax.program import say


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt, and what its completion is judged by."""

    tokens: list[int]
    references: tuple[str, ...] = ()
    task: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the file's object


def read_questions(args: argparse.Namespace, target: sj.LM) -> list[Question]:
    """From the file, the held-out functions, or random tokens for random weights.

    Raises:
      OptionError: a line of the file is bad, or lacks the test that ``--run-tests`` runs.
    """
    if target.tokenizer is None:
        generator = np.random.Generator(np.random.Philox(0))
        tokens = generator.integers(5, target.config.vocab_size, (args.num_prompts, 96))
        return [Question(row) for row in tokens.tolist()]
    if args.prompts:
        prompts, bad = read_prompts(args.prompts, target, args.chat)
        if bad:
            raise OptionError(f"--prompts {args.prompts} line {bad[0].number}: {bad[0].reason}")
        prompts = prompts[: args.num_prompts]
        if args.run_tests:
            check_tasks([prompt.entry for prompt in prompts])
        return [Question(p.tokens, references_of(p.entry), p.entry) for p in prompts]
    functions, warnings = held_out_functions(args.num_prompts)
    for warning in warnings:
        say("infer.bench", warning)
    return [Question(encode(target, f.prompt, args.chat), (f.reference,)) for f in functions]


def references_of(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts under ``references`` or ``reference``; of Spec-Bench's list the first turn's."""
    known = entry.get("references", entry.get("reference"))
    if isinstance(known, list) and "turns" in entry:
        known = known[:1]
    known = known if isinstance(known, list) else [known]
    return tuple(text for text in known if isinstance(text, str))
