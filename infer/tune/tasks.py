"""The prompts of validation and test file, and what ends their completions."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from infer.datasets.table import Source
from infer.prompts import Prompt, PromptEncoder, read_prompts, report, stops_of
from specjax._util.errors import OptionError
from specjax.lm import LM
from specjax.rewards import Reward


def sources(args: argparse.Namespace) -> tuple[Source | None, Source | None]:
    """What to read from the dataset for validation and for test.

    If both are the same file, the samples are disjoint.
    """
    if not args.dataset:
        return None, None
    validation = Source(args.dataset, args.sample, args.seed)
    skip = 0
    if args.test and os.path.realpath(args.test) == os.path.realpath(args.validation):
        skip = args.sample or 0
    return validation, Source(args.dataset, args.test_sample, args.seed, skip)


def stops(args: argparse.Namespace, prompts: Sequence[Prompt]) -> tuple[str, ...]:
    """What ends a completion: ``--stop``, or else the dataset's own stops."""
    if args.stop:
        return tuple(args.stop)
    return stops_of(prompt.entry for prompt in prompts) if args.dataset else ()


def read_task(
    path: str,
    option: str,
    target: LM,
    chat: bool,
    rewards: Sequence[Reward] | None,
    source: Source | None = None,
) -> list[Prompt]:
    """The prompts of a file; with ``rewards``, prompts that these can score.

    Raises:
      OptionError: the file cannot be read, or a line of it is bad. The message names it by
        ``option``, as the command line does.
    """
    encoder = PromptEncoder(target, chat=chat)
    prompts, bad = read_prompts(path, encoder, rewards, source, option=option)
    if bad:
        raise OptionError(f"{option} {path} line {bad[0].number}: {bad[0].reason}")
    report("infer.tune", prompts)
    return prompts
