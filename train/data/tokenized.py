"""What a tokenized corpus is, whether it lies in memory or in shards on the disk."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

CUT = "cut to data.seq_len"  # what is said of conversations that are kept in part


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

    def trained(self, document: int, begin: int, end: int) -> np.ndarray:
        """bool: which of these tokens are trained; of a text that is all of them."""
        ...


class HeldOutSource(NamedTuple):
    """The documents of one source that are never trained on.

    Attributes:
      name: of the source.
      documents: its held-out documents, at least one.
      weight: the source's share of training, relative to the others; of files that are only
        evaluated, their share of the held-out tokens.
    """

    name: str
    documents: Documents
    weight: float


Skipped = dict[str, dict[str, Any]]  # reason → {"count": …, "examples": [names]}


class Inventory(NamedTuple):
    """What a corpus is made of, and what was left out of it.

    Attributes:
      documents: their number, to train on and held out.
      tokens: their tokens, likewise.
      left_out: reason → the number of documents, and a few names as examples.
      unevaluated: names of sources without a held-out document.
      conversations: how many of the documents are conversations.
    """

    documents: tuple[int, int]
    tokens: tuple[int, int]
    left_out: Skipped
    unevaluated: Sequence[str] = ()
    conversations: int = 0

    def lines(self) -> list[str]:
        """The lines that a program prints about its corpus."""
        lines = [
            f"training: {self.documents[0]:,} documents, {self.tokens[0]:,} tokens",
            f"held out: {self.documents[1]:,} documents, {self.tokens[1]:,} tokens",
        ]
        if not self.documents[1]:
            lines[-1] += "; nothing is evaluated"
        elif self.unevaluated:
            names = ", ".join(self.unevaluated)
            lines.append(f"not evaluated, as nothing of it is held out: {names}")
        if self.conversations:
            lines.append(f"conversations among them: {self.conversations:,}")
        for reason, entry in self.left_out.items():
            examples = ", ".join(entry["examples"])
            such_as = f" (such as {examples})" if examples else ""
            what = reason if reason == CUT else f"left out, {reason}"
            lines.append(f"{what}: {entry['count']:,}{such_as}")
        return lines


class Corpus(Protocol):
    """A tokenized corpus: `Prepared` in memory, or `train.data.shards.reading.Shards` on the disk.

    Attributes:
      sources: the documents to train on, by source.
      weights: the sampling weight of each source, in rows, relative to the others.
      held_out: the documents that are never trained on, by source.
      inventory: what the corpus is made of, and what was left out.
      apart: whether documents are never joined or cut to fill a row, as conversations are not.
      fingerprint: a digest that changes with any token, mask and document boundary.
      threads: the number of threads that prefetch rows.
    """

    @property
    def sources(self) -> Sequence[Documents]: ...

    @property
    def weights(self) -> Sequence[float]: ...

    @property
    def held_out(self) -> Sequence[HeldOutSource]: ...

    @property
    def inventory(self) -> Inventory: ...

    @property
    def apart(self) -> bool: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def threads(self) -> int: ...

    def counts(self, size: int) -> np.ndarray:
        """`[2, size]` how often each id below `size` occurs: in training text, in held-out text."""
        ...


def weighed(sources: Sequence[HeldOutSource]) -> list[HeldOutSource]:
    """The sources as they are; if none is trained on, each has the weight of its own tokens."""
    if any(source.weight for source in sources):
        return list(sources)
    return [x._replace(weight=float(x.documents.lengths.sum())) for x in sources]


def without_held_out(
    names: Sequence[str], train_tokens: Sequence[int], ends: Sequence[int]
) -> list[str]:
    """Sources that are trained on and not evaluated; none if the user chose what is evaluated.

    Args:
      train_tokens: of each source.
      ends: where the held-out documents of each source end.
    """
    counts = np.diff(ends, prepend=0)
    trained = np.asarray(train_tokens) > 0
    if not counts[trained].any():
        return []
    return [str(name) for name in np.asarray(names)[trained & (counts == 0)]]


def train_tokens(corpus: Corpus) -> int:
    """Tokens of one epoch over all sources."""
    return sum(int(source.lengths.sum()) for source in corpus.sources)


def held_out_tokens(corpus: Corpus) -> int:
    """Tokens that are never trained on."""
    return sum(int(source.documents.lengths.sum()) for source in corpus.held_out)
