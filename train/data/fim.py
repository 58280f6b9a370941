"""Fill-in-the-middle at character level, in CodeLlama's order (arXiv 2308.12950, §2.3).

Documents are rearranged before they are tokenized, so a split may fall inside what would
have been one token. Half of the rearranged ones are prefix-suffix-middle, half
suffix-prefix-middle, whose prefix and middle are encoded as one text.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from specjax._util.errors import InputError
from specjax.models import ModelConfig
from specjax.runtime.infill import Sentinels
from train.data.corpus import is_held_out
from train.data.packing import Inside
from train.data.reading import Document


@dataclasses.dataclass(frozen=True)
class CodeLayout:
    """A document as code models train on it: BOS where there is one, FIM on some, EOS.

    Rearranged documents end in the sentinel instead of EOS. Held-out documents are never
    rearranged, so that their loss compares with any other run's.

    Attributes:
      fim_rate: the share of documents that is rearranged.
      seed: fixes, with the document's name, whether and where it is split.
    """

    eos_id: int
    bos_id: int | None = None
    sentinels: Sentinels | None = None
    fim_rate: float = 0.0
    seed: int = 0

    def __post_init__(self):
        if self.fim_rate and self.sentinels is None:
            raise InputError(
                f"sdsat.fim_rate={self.fim_rate}, but the tokenizer has no fill-in-the-middle "
                "sentinels: set sdsat.fim_rate=0"
            )

    @property
    def fingerprint(self) -> str:
        return repr(dataclasses.astuple(self))

    def pieces(self, document: Document) -> Sequence[str | int]:
        """The texts and ids of a document, in order."""
        text = document.text
        start = [] if self.bos_id is None else [self.bos_id]
        name = hashlib.sha256(f"{self.seed}\0{document.name}".encode()).digest()
        rng = np.random.Generator(np.random.Philox(int.from_bytes(name[:16], "little")))
        if is_held_out(document.name) or rng.random() >= self.fim_rate:
            return [*start, text, self.eos_id]
        spm = rng.random() < 0.5
        first, second = sorted(rng.integers(0, len(text) + 1, 2).tolist())
        prefix, middle, suffix = text[:first], text[first:second], text[second:]
        s = self.sentinels
        if spm:
            return [*start, s.prefix, s.suffix, Inside(suffix), s.middle, prefix + middle, s.end]
        parts = (prefix, s.suffix, Inside(suffix), s.middle, Inside(middle))
        return [*start, s.prefix, *parts, s.end]


def frame_of(checkpoint: str, model: ModelConfig, tokenizer: Tokenizer) -> tuple[int, int | None]:
    """The ids that end and begin a document of a checkpoint: its own EOS, and BOS or None.

    The tokenizer's template says whether a text begins with BOS; the config only names it.

    Raises:
      InputError: the checkpoint names no EOS.
    """
    if not model.eos_ids:
        raise InputError(f"model.init_from={checkpoint!r}: config.json names no eos_token_id")
    bos = model.bos_id if tokenizer.encode("").ids[:1] == [model.bos_id] else None
    return model.eos_ids[0], bos
