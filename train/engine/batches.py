"""The corpus of a run, and the batches of it that each process trains and evaluates on."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
from tokenizers import Tokenizer

from specjax._util import processes
from specjax._util.checks import INT32_MAX
from specjax._util.errors import InputError
from train.config import DataSection, HeadRunConfig, LMConfig, SDSATConfig
from train.data.chats import ChatFormat
from train.data.encoding import Layout
from train.data.in_memory import prepare
from train.data.loader import Loader, ValidBatch, epoch_tokens, make_loader, valid_batches
from train.data.packing import Transform
from train.data.reading import Document, Intake
from train.data.shards.building import load_documents, load_shards
from train.data.tokenized import Corpus, Skipped
from train.engine.loop import TextCounts

Config = TypeVar("Config", LMConfig, SDSATConfig, HeadRunConfig)


class Texts(NamedTuple):
    """A corpus as text in memory, and what was left out of it."""

    texts: list[Document]
    skipped: Skipped


def read_documents(data: DataSection, chats: ChatFormat | None = None) -> Texts:
    """The corpus of a config without shards; raises InputError as :func:`load_documents`.

    Args:
      chats: turns conversations into tokens; None: they are skipped.
    """
    intake = Intake(shortest=data.min_chars, chats=chats)
    texts = load_documents(data, intake)
    return Texts(texts, intake.skipped)


def open_corpus(
    data: DataSection,
    tokenizer: Tokenizer,
    layout: Layout,
    cache: Path | None,
    documents: Texts | None = None,
    chats: ChatFormat | None = None,
) -> Corpus:
    """The tokenized corpus of a config. Of several processes, the first makes missing shards.

    It prints on stderr what the corpus is made of, and what was left out.

    Args:
      cache: a directory that keeps the tokens of a corpus without shards. None: nothing is
        written, and shards must be there.
      documents: the corpus's text, if it is in memory already.
      chats: turns conversations into tokens; None: they are skipped.

    Raises:
      InputError: as :func:`load_shards` and :func:`load_documents`.
    """
    corpus = _read_corpus(data, tokenizer, layout, cache, documents, chats)
    if processes.is_main_process():
        for line in corpus.inventory.lines():
            print(line, file=sys.stderr, flush=True)
    return corpus


def _read_corpus(
    data: DataSection,
    tokenizer: Tokenizer,
    layout: Layout,
    cache: Path | None,
    documents: Texts | None,
    chats: ChatFormat | None,
) -> Corpus:
    if data.shards:
        make = cache is not None and processes.is_main_process()
        return load_shards(data, tokenizer, layout, make, chats)
    if documents is None:
        documents = read_documents(data, chats)
    return prepare(documents.texts, tokenizer, cache, layout, documents.skipped)


def with_total_steps(cfg: Config, data: Corpus) -> Config:
    """The config with the steps that ``optim.num_epochs`` asks for, if it does.

    Raises:
      InputError: they are more than an int32 can count.
    """
    optim = cfg.optim
    if not optim.num_epochs:
        return cfg
    step = optim.batch_size * optim.accumulate * cfg.data.seq_len
    steps = max(1, math.ceil(optim.num_epochs * epoch_tokens(data, cfg.data.seq_len) / step))
    if steps > INT32_MAX:
        raise InputError(
            f"optim.num_epochs={optim.num_epochs} are more than {INT32_MAX} steps: lower it"
        )
    return dataclasses.replace(cfg, optim=dataclasses.replace(optim, total_steps=steps))


def text_counts(cfg: LMConfig | SDSATConfig | HeadRunConfig, data: Corpus) -> TextCounts:
    """The tokens of text that a run's speed and progress are counted in."""
    return TextCounts(row=cfg.data.seq_len, epoch=epoch_tokens(data, cfg.data.seq_len))


def process_batches(
    cfg: LMConfig | SDSATConfig | HeadRunConfig,
    data: Corpus,
    transform: Transform | None = None,
    held_out: Transform | None = None,
    threads: int | None = None,
) -> tuple[Loader, list[ValidBatch]]:
    """(endless training batches, held-out batches), each with the rows of this process.

    Args:
      transform: changes a training row, as :func:`train.data.loader.make_loader` says.
      held_out: changes a held-out row in the same way.
      threads: that prefetch rows; by default as the corpus says.
    """
    batch_size = cfg.optim.batch_size
    process = jax.process_index()
    count = jax.process_count()

    loader = make_loader(
        data,
        cfg.data.seq_len,
        batch_size // count,
        cfg.run.seed,
        process_index=process,
        process_count=count,
        transform=transform,
        threads=threads,
    )
    valid = valid_batches(data, cfg.data.seq_len, batch_size, cfg.run.eval_batches, held_out)
    # The same rows that this process would get from the loader: every count-th one.
    shares = []
    for batch in valid:
        rows = {name: x[process::count] for name, x in batch.rows.items()}
        shares.append(batch._replace(rows=rows))
    return loader, shares
