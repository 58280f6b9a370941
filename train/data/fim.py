"""Fill-in-the-middle at character level, in CodeLlama's order (arXiv 2308.12950, §2.3).

Documents are rearranged before they are tokenized, so a split may fall inside a token. Half of the
rearranged documents are prefix-suffix-middle (PSM). The other half are suffix-prefix-middle (SPM),
whose prefix and middle are encoded as one text.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from specjax._util.errors import InputError
from specjax.runtime.infill import Sentinels
from train.data.corpus import is_evaluated
from train.data.encoding import MidText
from train.data.reading import Document


@dataclasses.dataclass(frozen=True)
class CodeLayout:
    """The layout of code models: BOS if the model has one, the text or its FIM order, then EOS.

    Rearranged documents end in a sentinel instead of EOS. Held-out documents are never
    rearranged, so that held-out losses of all runs are comparable.

    Attributes:
      fim_rate: the share of documents that is rearranged.
      seed: decides, with the document's name, whether and where a document is split.
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
        layout = self
        if not self.fim_rate:  # then nothing is drawn, and no sentinel is written
            layout = dataclasses.replace(self, sentinels=None, seed=0)
        return repr(dataclasses.astuple(layout))

    def parts(self, document: Document) -> Sequence[str | int]:
        """The texts and ids of a document, in order."""
        text = document.text
        start = [] if self.bos_id is None else [self.bos_id]
        # The order and the number of draws decide what each document becomes: keep both.
        name = hashlib.sha256(f"{self.seed}\0{document.name}".encode()).digest()
        rng = np.random.Generator(np.random.Philox(int.from_bytes(name[:16], "little")))
        if is_evaluated(document) or rng.random() >= self.fim_rate:
            return [*start, text, self.eos_id]
        spm = rng.random() < 0.5
        first, second = sorted(rng.integers(0, len(text) + 1, 2).tolist())
        prefix = text[:first]
        middle = text[first:second]
        suffix = text[second:]
        s = self.sentinels
        if spm:
            return [*start, s.prefix, s.suffix, MidText(suffix), s.middle, prefix + middle, s.end]
        parts = (prefix, s.suffix, MidText(suffix), s.middle, MidText(middle))
        return [*start, s.prefix, *parts, s.end]
