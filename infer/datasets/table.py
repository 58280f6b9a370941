"""The table of datasets: their readers, columns, and the completion lengths of the papers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from infer.datasets import readers
from infer.datasets.files import Row, read_rows
from infer.datasets.readers import Entry
from specjax._util.errors import OptionError, SpecjaxError


@dataclasses.dataclass(frozen=True)
class Dataset:
    """How a dataset is read.

    Args:
      read: turns the rows of a file into entries; it also gets the file's path.
      columns: names that every row must have, separated by spaces; ``a|b`` stands for either.
      new_tokens: the default of ``--max-new-tokens``.
      source: where it is published, a Hugging Face id or a file of a project.
    """

    read: Callable[[Iterable[Row], Path], Iterator[Entry]]
    columns: str
    new_tokens: int
    source: str


DATASETS = {
    "wikitext": Dataset(readers.wikitext, "text", 256, "Salesforce/wikitext"),
    "gsm8k": Dataset(readers.gsm8k, "question answer", 256, "openai/gsm8k"),
    "humaneval": Dataset(
        readers.humaneval,
        "task_id prompt canonical_solution test entry_point",
        512,
        "openai/openai_humaneval",
    ),
    "humaneval-x": Dataset(
        readers.humaneval_x, "task_id prompt canonical_solution test", 512, "THUDM/humaneval-x"
    ),
    "infilling": Dataset(
        readers.infilling, "prompt suffix canonical_solution", 128, "bigcode/santacoder-fim-task"
    ),
    "mbpp": Dataset(
        readers.mbpp, "task_id text|prompt code test_list", 512, "google-research-datasets/mbpp"
    ),
    "multipl-e": Dataset(
        readers.multipl_e, "name language prompt tests stop_tokens", 512, "nuprl/MultiPL-E"
    ),
    "alpaca-eval": Dataset(readers.alpaca_eval, "instruction output", 512, "tatsu-lab/alpaca_eval"),
    "cnn-dailymail": Dataset(
        readers.cnn_dailymail, "article highlights", 128, "abisee/cnn_dailymail"
    ),
    "spider": Dataset(readers.spider, "db_id question query", 128, "Spider, dev.json"),
    "chatgpt-prompts": Dataset(
        readers.chatgpt_prompts,
        "human_prompt chatgpt_response",
        128,
        "MohamedRashad/ChatGPT-prompts",
    ),
    "chatalpaca": Dataset(readers.chatalpaca, "conversations", 128, "ChatAlpaca, data/*.json"),
    "mt-bench": Dataset(readers.mt_bench, "turns|prompt category", 128, "MT-Bench, question.jsonl"),
    "spec-bench": Dataset(
        readers.mt_bench, "question_id turns category", 1024, "Spec-Bench, data/spec_bench"
    ),
    "speed-bench": Dataset(
        readers.mt_bench, "question_id turns category", 1024, "nvidia/SPEED-Bench"
    ),
    "commongen": Dataset(
        readers.commongen, "concepts|concept_set target|scene", 64, "allenai/common_gen"
    ),
    "hh-rlhf": Dataset(readers.hh_rlhf, "chosen", 128, "Anthropic/hh-rlhf"),
}


def read_dataset(name: str, path: str) -> list[Entry]:
    """The entries of a file of the dataset ``name``.

    Raises:
      OptionError: the file cannot be read, is empty, or is not of this dataset.
    """
    dataset = DATASETS[name]
    try:
        entries = list(dataset.read(_checked_rows(name, path), Path(path)))
    except SpecjaxError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError):
        raise OptionError(
            f"{path}: a row has other values than {name}'s: give the file as it is published "
            f"({dataset.source}), or another --dataset"
        ) from None
    if not entries:
        raise OptionError(f"{path} has no rows of --dataset {name} ({dataset.source})")
    return entries


def _checked_rows(name: str, path: str) -> Iterator[Row]:
    """The rows of a file, after a check that each has the dataset's columns."""
    dataset = DATASETS[name]
    for number, row in enumerate(read_rows(path), 1):
        for column in dataset.columns.split():
            if not any(choice in row for choice in column.split("|")):
                columns = ", ".join(map(str, row)) or "none"
                raise OptionError(
                    f"{path}: row {number} lacks the column {column.replace('|', ' or ')} of "
                    f"{name}; its columns are {columns}: give the file as it is published "
                    f"({dataset.source}), or another --dataset"
                )
        yield row


@dataclasses.dataclass(frozen=True)
class Source:
    """A dataset by name, and which entries of a file to use.

    Args:
      count: use so many entries, in an order that depends on ``seed``; None: all, in order.
      skip: leave out so many entries of that order, which another sample uses.
    """

    name: str
    count: int | None = None
    seed: int = 0
    skip: int = 0

    def read(self, path: str) -> list[Entry]:
        """The entries.

        Raises:
          OptionError: as :func:`read_dataset`, or there are fewer than ``skip + count`` entries.
        """
        entries = read_dataset(self.name, path)
        if self.count is None:
            return entries
        if self.skip + self.count > len(entries):
            other = f" and another of {self.skip}" if self.skip else ""
            raise OptionError(
                f"{path}: has {len(entries)} prompts, too few for a sample of {self.count}{other}"
            )
        random.Random(self.seed).shuffle(entries)
        return entries[self.skip : self.skip + self.count]
