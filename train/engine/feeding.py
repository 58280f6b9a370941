"""What the processes of a run read: the corpus once, and each its own rows of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
from tokenizers import Tokenizer

from specjax._util import processes
from train.config import DataSection, HeadRunConfig, LMConfig, SDSATConfig
from train.data.making import own_documents, own_shards
from train.data.packing import (
    Batch,
    Corpus,
    Layout,
    Loader,
    Transform,
    make_loader,
    prepare,
    valid_batches,
)
from train.data.reading import Document


def own_corpus(
    data: DataSection,
    tokenizer: Tokenizer,
    layout: Layout,
    cache: Path | None,
    documents: Sequence[Document] | None = None,
) -> Corpus:
    """The corpus of a config; of several processes the first one makes what is missing.

    Args:
      cache: keeps its tokens, where no shards do. None: nothing is written, and shards must be
        there.
      documents: its text, where that is in memory already.
    Raises:
      InputError: as :func:`own_shards` and :func:`own_documents`.
    """
    if data.shards:
        return own_shards(data, tokenizer, layout, make=cache is not None and processes.leads())
    return prepare(documents or own_documents(data), tokenizer, cache, layout)


def own_batches(
    cfg: LMConfig | SDSATConfig | HeadRunConfig,
    data: Corpus,
    transform: Transform | None = None,
    held_out: Transform | None = None,
) -> tuple[Loader, list[Batch]]:
    """(endless batches, held-out batches) of this process's rows.

    Args:
      transform, held_out: change a row of either, as :func:`train.data.packing.make_loader` says.
    """
    rows, length = cfg.optim.batch_size, cfg.data.seq_len
    process, count = jax.process_index(), jax.process_count()
    own = {"process_index": process, "process_count": count, "transform": transform}
    loader = make_loader(data, length, rows // count, cfg.run.seed, **own)
    valid = valid_batches(data, length, rows, cfg.run.eval_batches, held_out)
    return loader, [{name: x[process::count] for name, x in batch.items()} for batch in valid]
