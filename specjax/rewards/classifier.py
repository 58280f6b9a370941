"""The ``classifier:DIR`` reward: a transformers sequence classifier. Needs the torch extra."""

from __future__ import annotations

import functools
import os
from typing import Any

from specjax._util.errors import OptionError, errors_as, silence_stderr
from specjax._util.files import check_entries, expand_user
from specjax.models.hf.config import check_values
from specjax.models.hf.files import read_json
from specjax.rewards.protocol import Sample
from specjax.rewards.text import OfText

BATCH = 32  # texts per forward
UNLIMITED = 2**31 - 1  # tokens, where neither tokenizer nor model has a limit


def most_positions(model: Any) -> int | None:
    """The most tokens that a model of transformers reads; None if its config does not say.

    RoBERTa's kind has positions from the padding's id on, which are no tokens'.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    padding = getattr(getattr(model.base_model, "embeddings", None), "padding_idx", None)
    if not positions or padding is None:
        return positions
    return positions - padding - 1


class Classifier(OfText):
    """The probability of the last class, by a sequence classifier of transformers.

    With one logit it is the sigmoid of that. With more it is the softmax's last entry.

    Prompt and completion go to the tokenizer as a pair of texts, which it joins with its own
    separators and token types. If its pairs have no separator, it gets both as one text. If they
    are too long for the model, the beginning of the prompt is cut. If the completion alone is too
    long, its end is kept. Texts are padded into batches if the config names a padding token of the
    vocabulary; otherwise they are scored one by one.

    Raises:
      OptionError: there is no such directory, no classifier in it, or no torch.
    """

    name = "classifier"
    full = 0.5

    def __init__(self, directory: str):
        self.directory = expand_user(directory)
        if not os.path.isfile(self.directory / "config.json"):
            raise OptionError(
                f"reward classifier: {directory} is no model directory (it has no config.json)"
            )
        try:
            import torch  # noqa: F401
        except ImportError:
            raise OptionError(
                'reward classifier needs torch: pip install "specjax[torch]"'
            ) from None

    @functools.cached_property
    def _loaded(self):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        """Tokenizer, model, and how many texts a batch has."""
        failed = f"reward classifier: {self.directory} cannot be loaded"
        with errors_as(failed, OptionError), silence_stderr():
            check_entries(self.directory)
            check_values(read_json(self.directory / "config.json"))
            tokenizer = AutoTokenizer.from_pretrained(
                self.directory, truncation_side="left", padding_side="right"
            )
            model, report = AutoModelForSequenceClassification.from_pretrained(
                self.directory, output_loading_info=True
            )
            # transformers only warns, and fills in random weights for these.
            wrong = sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"])))
            if wrong:
                raise ValueError(f"{wrong[0]} is not in its files as its config says")
        model.eval()
        pad_id = model.config.get_text_config().pad_token_id
        if pad_id not in range(len(tokenizer)):
            return tokenizer, model, 1
        # Decoder models read the last token that is not this one, so the tokenizer must use it.
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id)
        return tokenizer, model, BATCH

    def check(self, tokenizer, constraints):
        super().check(tokenizer, constraints)
        with errors_as(f"reward classifier: {self.directory} cannot score a text", OptionError):
            self.score(Sample("b", "a ", (), {}))

    def score(self, sample):
        return self.score_many([sample])[0]

    def score_many(self, samples):
        """The scores of several samples, batch by batch."""
        _, _, batch_size = self._loaded
        scores = []
        for first in range(0, len(samples), batch_size):
            scores += self._scores_of_batch(samples[first : first + batch_size])
        return scores

    def _scores_of_batch(self, samples):
        import torch

        tokenizer, model, _ = self._loaded
        rows = [self.encode(sample) for sample in samples]
        inputs = tokenizer.pad(rows, padding=len(rows) > 1, return_tensors="pt")
        with torch.inference_mode():
            logits = model(**inputs).logits.double()
        if logits.ndim != 2 or not logits.shape[1]:
            raise ValueError(f"its logits have the shape {list(logits.shape)}")
        # softmax(x)[-1] is the sigmoid of the last logit minus the log-sum-exp of the others.
        others = 0.0
        if logits.shape[1] > 1:
            others = torch.logsumexp(logits[:, :-1], 1)
        return torch.sigmoid(logits[:, -1] - others).tolist()

    def encode(self, sample):
        """The model's inputs for one sample: ids, mask, and what else the tokenizer gives."""
        tokenizer, model, _ = self._loaded
        positions = most_positions(model) or UNLIMITED
        limit = min(tokenizer.model_max_length, positions, UNLIMITED)
        special_of_one = tokenizer.num_special_tokens_to_add(False)
        special_of_pair = tokenizer.num_special_tokens_to_add(True)
        if special_of_pair == special_of_one:  # no separator between the two
            return tokenizer(sample.prompt + sample.text, truncation=True, max_length=limit)

        completion = tokenizer(sample.text, add_special_tokens=False)["input_ids"]
        # Strictly less: `only_first` must leave at least one token of the prompt.
        if len(completion) < limit - special_of_pair:
            return tokenizer(sample.prompt, sample.text, truncation="only_first", max_length=limit)
        return tokenizer("", sample.text, truncation="only_second", max_length=limit)
