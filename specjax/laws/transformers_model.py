"""A sampler for :func:`specjax.laws.check`: ``generate`` of transformers, assisted or not.

Axis legend: N prefixes or samples, n tokens of a prefix, L tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

ROWS = 512  # of a batch without an assistant


@dataclasses.dataclass(frozen=True)
class TransformersSampler:
    """Draws from a model of transformers (PyTorch), with ``do_sample``.

    Attributes:
      model: a causal language model with a small vocabulary, and no token that ends a row.
      prompt: token ids, at least one.
      length: L, tokens of a sample.
      assistant: a draft model, for assisted generation; its ``generation_config`` says how much it
        drafts. Rows are then drawn one by one, for transformers assists no batches.
      temperature: of the draws, above 0.
      options: further arguments of ``generate``.
    """

    model: Any
    prompt: Sequence[int]
    length: int
    assistant: Any = None
    temperature: float = 1.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def draw(self, samples: int, seed: int) -> Int[np.ndarray, "N L"]:
        """Samples, their rows independent."""
        import torch

        torch.manual_seed(seed)
        prompt = torch.tensor([list(self.prompt)])
        how: dict[str, Any] = {
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": 0,
            "max_new_tokens": self.length,
            "min_new_tokens": self.length,
            # Without a mask, tokens of the prompt that are the padding's would be left out.
            "attention_mask": torch.ones_like(prompt),
            "pad_token_id": 0,
        }
        if self.assistant is not None:
            how["assistant_model"] = self.assistant
        rows = []
        while len(rows) < samples:
            count = 1 if self.assistant is not None else min(ROWS, samples - len(rows))
            made = self.model.generate(
                prompt, num_return_sequences=count, **how | dict(self.options)
            )
            rows += made[:, prompt.shape[1] :].tolist()
        return np.array(rows)

    def next_p(self, prefixes: Int[np.ndarray, "N n"]) -> Float[np.ndarray, "N V"]:
        """The model's probabilities of the next token."""
        return self._next_law(self.model, prefixes)

    def next_q(self, prefixes: Int[np.ndarray, "N n"]) -> Float[np.ndarray, "N V"]:
        """The assistant's."""
        return self._next_law(self.assistant, prefixes)

    def _next_law(self, model: Any, prefixes: np.ndarray) -> np.ndarray:
        import torch

        prompts = torch.tensor([list(self.prompt)]).expand(len(prefixes), -1)
        rows = torch.cat([prompts, torch.tensor(np.ascontiguousarray(prefixes))], dim=1)
        with torch.no_grad():
            logits = model(rows).logits[:, -1].double()
        return torch.softmax(logits / self.temperature, -1).numpy()
