"""The ``classifier:DIR`` reward: a transformers sequence classifier. Needs the torch extra."""

from __future__ import annotations

import functools
from pathlib import Path

from specjax.errors import OptionError
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
        if not (self.directory / "config.json").is_file():
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

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.directory)
            model = AutoModelForSequenceClassification.from_pretrained(self.directory).eval()
        except (OSError, ValueError, KeyError) as error:
            first = str(error).strip().splitlines()[0]
            raise OptionError(
                f"reward classifier: {self.directory} cannot be loaded ({first})"
            ) from None
        return tokenizer, model

    def check(self, tokenizer, constraints):
        super().check(tokenizer, constraints)
        _ = self._loaded

    def score(self, sample):
        import torch

        tokenizer, model = self._loaded
        inputs = tokenizer(sample.prompt + sample.text, return_tensors="pt", truncation=True)
        with torch.inference_mode():
            logits = model(**inputs).logits[0].double()
        rest = torch.logsumexp(logits[:-1], 0) if len(logits) > 1 else 0.0
        return float(torch.sigmoid(logits[-1] - rest))
