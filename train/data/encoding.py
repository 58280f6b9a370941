"""From a document's text to token ids: the layout of a document, and an encoder that follows it.

A layout says which texts of a document are encoded and which ids stand between them, such as EOS.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
from tokenizers import Encoding, Tokenizer

from specjax._util.errors import InputError, errors_as, silence_failures
from specjax.runtime.infill import leading_ids
from train.data.reading import Document
from train.data.tokenizer import EOS_ID, id_count

# Limits of one call of the tokenizer, which keeps all of its results in memory.
_BATCH_DOCUMENTS = 256
_BATCH_CHARS = 1 << 20


class MidText(str):
    """A text in the middle of a document: the space that a tokenizer puts first is left out."""


class Layout(Protocol):
    """How a document becomes tokens: texts to encode, and ids that are taken as they are."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the parts of any document do. Cached tokens depend on it."""
        ...

    def parts(self, document: Document) -> Sequence[str | int]:
        """The texts and ids of a document, in order."""
        ...


@dataclasses.dataclass(frozen=True)
class Plain:
    """BOS if there is one, the text, then EOS."""

    eos_id: int = EOS_ID
    bos_id: int | None = None

    @property
    def fingerprint(self) -> str:
        return repr(dataclasses.astuple(self))

    def parts(self, document: Document) -> Sequence[str | int]:
        start = [] if self.bos_id is None else [self.bos_id]
        return [*start, document.text, self.eos_id]


def id_type(tokenizer: Tokenizer) -> type:
    """The smallest integer type for the tokenizer's ids: uint16 or uint32."""
    return np.uint16 if id_count(tokenizer) <= 1 << 16 else np.uint32


class TextEncoder:
    """Encodes documents as a layout says, with a tokenizer of its own.

    Keep one encoder for many calls. A new tokenizer was measured a quarter slower in a process
    that had used and freed three others, because its small allocations were scattered.
    """

    def __init__(self, tokenizer: str, layout: Layout):
        self._tokenizer = Tokenizer.from_str(tokenizer)
        self._layout = layout
        # "<|endoftext|>" in a source file is plain text.
        self._tokenizer.encode_special_tokens = True
        self._dtype = id_type(self._tokenizer)
        encode = self._tokenizer.encode
        # Ids that a MidText begins with because of the line break that _text puts before it.
        self._lead = len(leading_ids(lambda text: encode(text, add_special_tokens=False).ids))
        self.vocab_size = id_count(self._tokenizer)

    def __call__(
        self, documents: Iterable[Document]
    ) -> Iterator[tuple[list[Document], list[np.ndarray]]]:
        """Yields (some of the documents, the token ids of each), batch by batch.

        Conversations are tokenized already: a layout does not apply to them.

        Raises:
          InputError: the tokenizer gives up on a text: a pattern of its file may backtrack
            without end.
        """
        for batch in _batches(documents):
            parts_of = [self._parts(document) for document in batch]
            texts = [
                self._text(part) for parts in parts_of for part in parts if isinstance(part, str)
            ]
            encodings = iter(self._encode(texts, batch))
            yield batch, [self._join(parts, encodings) for parts in parts_of]

    def _parts(self, document: Document) -> Sequence[str | int]:
        """The texts and ids of a document; a conversation has ids alone."""
        if document.ids is None:
            return self._layout.parts(document)
        return document.ids.tolist()

    def _encode(self, texts: list[str], batch: Sequence[Document]) -> list[Encoding]:
        """The encodings of the texts of a batch of documents."""
        failed = f"the tokenizer cannot encode a document from {batch[0].name} on"
        with errors_as(failed, InputError), silence_failures():  # Rust reports its panic there
            return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)

    def _text(self, text: str) -> str:
        """What the tokenizer gets for a text of the layout."""
        if self._lead and isinstance(text, MidText):
            return "\n" + text
        return text

    def _join(self, parts: Sequence[str | int], encodings: Iterator[Encoding]) -> np.ndarray:
        """The ids of one document; takes an encoding for each text among its parts."""
        ids: list[int] = []
        for part in parts:
            if isinstance(part, MidText):
                ids += next(encodings).ids[self._lead :]
            elif isinstance(part, str):
                ids += next(encodings).ids
            else:
                ids.append(part)
        return np.asarray(ids, self._dtype)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Groups of documents, each small enough for one call of the tokenizer."""
    batch: list[Document] = []
    chars = 0
    for document in documents:
        batch.append(document)
        chars += len(document.text)
        if len(batch) == _BATCH_DOCUMENTS or chars >= _BATCH_CHARS:
            yield batch
            batch = []
            chars = 0
    if batch:
        yield batch
