"""The corpus of a run, and the batches of it that each process trains and evaluates on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
from tokenizers import Tokenizer

from specjax._util import processes
from train.config import DataSection, HeadRunConfig, LMConfig, SDSATConfig
from train.data.encoding import Layout
from train.data.in_memory import prepare
from train.data.loader import Loader, make_loader, valid_batches
from train.data.packing import Batch, Transform
from train.data.reading import Document
from train.data.shards.building import load_documents, load_shards
from train.data.tokenized import Corpus


def open_corpus(
    data: DataSection,
    tokenizer: Tokenizer,
    layout: Layout,
    cache: Path | None,
    documents: Sequence[Document] | None = None,
) -> Corpus:
    """The tokenized corpus of a config. Of several processes, the first makes missing shards.

    Args:
      cache: a directory that keeps the tokens of a corpus without shards. None: nothing is
        written, and shards must be there.
      documents: the corpus's text, if it is in memory already.

    Raises:
      InputError: as :func:`load_shards` and :func:`load_documents`.
    """
    if data.shards:
        make = cache is not None and processes.is_main_process()
        return load_shards(data, tokenizer, layout, make=make)
    return prepare(documents or load_documents(data), tokenizer, cache, layout)


def process_batches(
    cfg: LMConfig | SDSATConfig | HeadRunConfig,
    data: Corpus,
    transform: Transform | None = None,
    held_out: Transform | None = None,
) -> tuple[Loader, list[Batch]]:
    """(endless training batches, held-out batches), each with the rows of this process.

    Args:
      transform: changes a training row, as :func:`train.data.loader.make_loader` says.
      held_out: changes a held-out row in the same way.
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
    )
    valid = valid_batches(data, cfg.data.seq_len, batch_size, cfg.run.eval_batches, held_out)
    # The same rows that this process would get from the loader: every count-th one.
    shares = [{name: x[process::count] for name, x in batch.items()} for batch in valid]
    return loader, shares
