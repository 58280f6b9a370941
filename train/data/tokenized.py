"""What a tokenized corpus is, whether it lies in memory or in shards on the disk."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Documents(Protocol):
    """Tokenized documents with random access.

    Attributes:
      lengths: `[documents]` tokens of each document.
    """

    @property
    def lengths(self) -> np.ndarray: ...

    def read(self, document: int, begin: int, end: int) -> np.ndarray:
        """Tokens `begin` to before `end` of a document."""
        ...


class Corpus(Protocol):
    """A tokenized corpus: `Prepared` in memory, or `train.data.shards.reading.Shards` on the disk.

    Attributes:
      sources: the documents to train on, by source.
      weights: the sampling weight of each source, in rows, relative to the others.
      held_out: the documents that are never trained on.
      valid_bytes: UTF-8 bytes of the held-out texts (EOS counts no byte).
      fingerprint: a digest that changes with any token and any document boundary.
      threads: the number of threads that prefetch rows.
    """

    valid_bytes: int

    @property
    def sources(self) -> Sequence[Documents]: ...

    @property
    def weights(self) -> Sequence[float]: ...

    @property
    def held_out(self) -> Documents: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def threads(self) -> int: ...

    def counts(self, size: int) -> np.ndarray:
        """`[2, size]` how often each id below `size` occurs: in training text, in held-out text."""
        ...


def train_tokens(corpus: Corpus) -> int:
    """Tokens of one epoch over all sources."""
    return sum(int(source.lengths.sum()) for source in corpus.sources)


def held_out_tokens(corpus: Corpus) -> int:
    """Tokens that are never trained on."""
    return int(corpus.held_out.lengths.sum())
