"""A sampler for :func:`specjax.laws.check`: the completions of an OpenAI-compatible server.

Axis legend: N prefixes or samples, n tokens of a prefix, L tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from specjax._util.errors import OptionError

ONLY = 100  # the bias of the tokens that may be drawn; all others get none
TIMEOUT = 600  # seconds, for a server may compile


@dataclasses.dataclass(frozen=True)
class ServerSampler:
    """Draws from ``/v1/completions`` of a server, over a vocabulary of a few tokens.

    ``logit_bias`` leaves only ``tokens``. Their probabilities are the server's own: it is asked
    for the log-probabilities of prompts (``echo`` with ``logprobs``), which are those of the
    unwarped model. So the test finds what speculation changes, and no error of the model.

    Attributes:
      url: the server with its version, as ``http://127.0.0.1:8000/v1``.
      prompt: token ids, at least one.
      tokens: the V token ids that may follow. Their texts must differ.
      length: L, tokens of a sample.
      temperature: of the draws, above 0.
      options: further fields of each drawing request, as ``{"top_p": 1}``.
      model: the model's name; the first that the server lists if empty.
      api_key: sent as a bearer token, if there is one.
      rows: samples per request (``n``).
    """

    url: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    length: int
    temperature: float = 1.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: str = ""
    api_key: str = ""
    rows: int = 64

    def draw(self, samples: int, seed: int) -> Int[np.ndarray, "N L"]:
        """Samples, as places in ``tokens``. Requests have different seeds.

        Raises:
          OptionError: the server refuses a request, or answers with other tokens.
        """
        places = {text: place for place, text in enumerate(self._texts())}
        drawn: list[list[int]] = []
        while len(drawn) < samples:
            body = {
                "prompt": list(self.prompt),
                "max_tokens": self.length,
                "n": min(self.rows, samples - len(drawn)),
                "temperature": self.temperature,
                "seed": seed * samples + len(drawn),
                "logit_bias": {str(token): ONLY for token in self.tokens},
                "logprobs": 1,
            }
            for choice in self._complete(body | dict(self.options)):
                texts = choice["logprobs"]["tokens"]
                if len(texts) != self.length or not set(texts) <= set(places):
                    raise OptionError(
                        f"the server wrote {texts}; expected {self.length} tokens of {[*places]}"
                    )
                drawn.append([places[text] for text in texts])
        return np.array(drawn)

    def next_p(self, prefixes: Int[np.ndarray, "N n"]) -> Float[np.ndarray, "N V"]:
        """Probabilities of the next token, from the server's log-probabilities of prompts.

        Raises:
          OptionError: the server refuses a request.
        """
        ids = np.asarray(self.tokens)
        whole = [
            [*self.prompt, *ids[prefix].tolist(), token]
            for prefix in prefixes
            for token in ids.tolist()
        ]
        last = len(self.prompt) + prefixes.shape[1]
        scores = [scored["token_logprobs"][last] for scored in self._scored(whole)]
        scaled = np.array(scores, np.float64).reshape(len(prefixes), -1) / self.temperature
        weights = np.exp(scaled - scaled.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def _texts(self) -> list[str]:
        """The texts of ``tokens``, as the server names them."""
        (scored,) = self._scored([list(self.tokens)])
        texts = scored["tokens"][: len(self.tokens)]
        if len(set(texts)) != len(self.tokens):
            raise OptionError(f"tokens={list(self.tokens)} are the texts {texts}: give others")
        return texts

    def _scored(self, prompts: list[list[int]]) -> Iterator[dict[str, Any]]:
        """The ``logprobs`` of prompts; one more token is generated, which nobody reads."""
        for first in range(0, len(prompts), self.rows):
            body = {
                "prompt": prompts[first : first + self.rows],
                "max_tokens": 1,
                "echo": True,
                "logprobs": 1,
                "temperature": 0,
            }
            for choice in self._complete(body):
                yield choice["logprobs"]

    def _complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        answer = self._ask("/completions", body | {"model": self.model or self._first_model()})
        return sorted(answer["choices"], key=lambda choice: choice["index"])

    def _first_model(self) -> str:
        return self._ask("/models")["data"][0]["id"]

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise OptionError(f"{path} of {self.url}: {error.read().decode()[:500]}") from None
        except (urllib.error.URLError, ValueError) as error:
            raise OptionError(f"{path} of {self.url}: {error}") from None
