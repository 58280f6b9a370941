"""The ``classifier:DIR`` reward: a transformers sequence classifier. Needs the torch extra."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from specjax._util.errors import OptionError, foreign, silent
from specjax._util.files import check_entries
from specjax.models.hf.config import check_values
from specjax.models.hf.files import read_json
from specjax.rewards.protocol import Sample
from specjax.rewards.text import OfText

BATCH = 32  # texts per forward
UNBOUNDED = 2**31 - 1  # tokens, where neither tokenizer nor model says how many it reads


class Classifier(OfText):
    """The probability of the last class for prompt and completion, by a model directory.

    One logit passes a sigmoid; of two or more, the last against the rest: the sigmoid of its
    log-odds.

    Prompt and completion are the pair of texts that the tokenizer joins, with its own separators
    and token types. A tokenizer whose pairs have no separator gets both as one text. What is
    longer than the model reads loses the beginning of the prompt; of a completion that is too
    long alone the end is kept. Texts are padded into batches where the config names a padding
    token of the vocabulary, else scored one by one.

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
            tokenizer = AutoTokenizer.from_pretrained(
                self.directory, truncation_side="left", padding_side="right"
            )
            model, found = AutoModelForSequenceClassification.from_pretrained(
                self.directory, output_loading_info=True
            )
            wrong = sorted(map(str, (*found["missing_keys"], *found["mismatched_keys"])))
            if wrong:  # transformers fills in what a checkpoint lacks, at random
                raise ValueError(f"{wrong[0]} is not in its files as its config says")
        padding = model.config.get_text_config().pad_token_id
        padded = padding in range(len(tokenizer))
        if padded:  # decoders look for the last token that is not this one
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding)
        return tokenizer, model.eval(), BATCH if padded else 1

    def check(self, tokenizer, constraints):
        super().check(tokenizer, constraints)
        with foreign(f"reward classifier: {self.directory} cannot score a text", OptionError):
            self.score(Sample("b", "a ", (), {}))

    def score(self, sample):
        return self.score_many([sample])[0]

    def score_many(self, samples):
        size = self._loaded[2]
        batches = [samples[first : first + size] for first in range(0, len(samples), size)]
        return [score for batch in batches for score in self._scores(batch)]

    def _scores(self, samples):
        import torch

        tokenizer, model, _ = self._loaded
        rows = [self.encode(sample) for sample in samples]
        inputs = tokenizer.pad(rows, padding=len(rows) > 1, return_tensors="pt")
        with torch.inference_mode():
            logits = model(**inputs).logits.double()
        if logits.ndim != 2 or not logits.shape[1]:
            raise ValueError(f"its logits have the shape {list(logits.shape)}")
        rest = torch.logsumexp(logits[:, :-1], 1) if logits.shape[1] > 1 else 0.0
        return torch.sigmoid(logits[:, -1] - rest).tolist()

    def encode(self, sample):
        """The model's inputs for one sample: ids, mask and what else the tokenizer gives."""
        tokenizer, model, _ = self._loaded
        positions = getattr(model.config, "max_position_embeddings", None) or UNBOUNDED
        limit = min(tokenizer.model_max_length, positions, UNBOUNDED)
        ends, separated = (tokenizer.num_special_tokens_to_add(pair) for pair in (False, True))
        if separated == ends:
            return tokenizer(sample.prompt + sample.text, truncation=True, max_length=limit)
        alone = tokenizer(sample.text, add_special_tokens=False)["input_ids"]
        if len(alone) < limit - separated:
            pair, cut = (sample.prompt, sample.text), "only_first"
        else:
            pair, cut = ("", sample.text), "only_second"
        return tokenizer(*pair, truncation=cut, max_length=limit)
