"""The ``classifier:DIR`` reward: a transformers sequence classifier. Needs the torch extra."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from specjax.errors import OptionError, foreign, silent
from specjax.files import check_entries
from specjax.models.hf.checkpoint import read_json
from specjax.models.hf.config import check_values
from specjax.rewards.text import OfText


class Classifier(OfText):
    """The probability of the last class for prompt and completion, by a model directory.

    One logit passes a sigmoid; of two or more, the last against the rest: the sigmoid of its
    log-odds.

    Raises:
      OptionError: no such directory, no sequence classifier in it, or no torch.
    """

    name = "classifier"
    full = 0.5

    def __init__(self, directory: str):
        self.directory = Path(directory).expanduser()
        if not os.path.isfile(self.directory / "config.json"):
            raise OptionError(
                f"reward classifier: {directory} is no model directory (it has no config.json)"
            )
        try:
            import torch  # noqa: F401
        except ImportError:
            raise OptionError(
                "reward classifier needs torch: pip install 'specjax[torch]'"
            ) from None

    @functools.cached_property
    def _loaded(self):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        says = f"reward classifier: {self.directory} cannot be loaded"
        with foreign(says, OptionError), silent():
            check_entries(self.directory)
            check_values(read_json(self.directory / "config.json"))
            tokenizer = AutoTokenizer.from_pretrained(self.directory)
            model, found = AutoModelForSequenceClassification.from_pretrained(
                self.directory, output_loading_info=True
            )
            wrong = sorted(map(str, (*found["missing_keys"], *found["mismatched_keys"])))
            if wrong:  # transformers fills in what a checkpoint lacks, at random
                raise ValueError(f"{wrong[0]} is not in its files as its config says")
        return tokenizer, model.eval()

    def check(self, tokenizer, constraints):
        super().check(tokenizer, constraints)
        with foreign(f"reward classifier: {self.directory} cannot score a text", OptionError):
            self._logits("a b")

    def _logits(self, text: str):
        import torch

        tokenizer, model = self._loaded
        inputs = tokenizer(text, return_tensors="pt", truncation=True)
        with torch.inference_mode():
            logits = model(**inputs).logits
        if logits.ndim != 2 or not logits.shape[1]:
            raise ValueError(f"its logits have the shape {list(logits.shape)}")
        return logits[0].double()

    def score(self, sample):
        import torch

        logits = self._logits(sample.prompt + sample.text)
        rest = torch.logsumexp(logits[:-1], 0) if len(logits) > 1 else 0.0
        return float(torch.sigmoid(logits[-1] - rest))
