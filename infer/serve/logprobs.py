"""OpenAI's ``logprobs`` objects: the tokens of a row, their log-probabilities and alternatives.

A token's text is what it adds to the row's text, so the texts of all tokens joined are that text. A
character of several tokens belongs to the last of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from specjax.text.incremental_decoder import IncrementalDecoder
from specjax.text.tokenizer import Tokenizer

# Stands for the log-probability -inf, e.g. of an id above the tokenizer's: JSON has no infinity.
LOWEST_LOGPROB = -9999.0

Object = dict[str, Any]
Alternative = tuple[int, float]  # a token's id and its log-probability in nats


class RowLogprobs:
    """Builds the objects of one row, whole or piece by piece.

    Args:
      context: the ids before the first token.
      chat: as chat answers have them; False: as completions do.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], chat: bool):
        self._tokenizer = tokenizer
        self._chat = chat
        self._decoder = IncrementalDecoder(tokenizer, context)
        self._offset = 0  # where the next token's text begins

    def add(
        self,
        tokens: Sequence[int],
        values: Sequence[float | None],
        tops: Sequence[Sequence[Alternative]],
        *,
        last: bool,
        text_length: int | None = None,
    ) -> Object:
        """The object of the row's next tokens.

        Args:
          values: their log-probabilities in nats; None of a text's first token, which has none.
          tops: alternatives to each, the most likely first.
          last: these are the row's last tokens.
          text_length: of the row's text, which a stop string may have cut; None: not known yet.
        """
        texts = [self._decoder.push([token]) for token in tokens]
        if last and texts:
            texts[-1] += self._decoder.flush()

        offsets = []
        for number, text in enumerate(texts):
            offsets.append(self._offset)
            if text_length is not None:
                texts[number] = text[: max(0, text_length - self._offset)]
            self._offset += len(texts[number])

        if self._chat:
            rows = zip(tokens, texts, values, tops, strict=True)
            return {"content": [self._chat_entry(*row) for row in rows], "refusal": None}
        by_name = []
        for token, value, top in zip(tokens, values, tops, strict=True):
            # OpenAI lists the token itself, too.
            by_name.append(None if value is None else self._by_name([(token, value), *top]))
        return {
            "tokens": texts,
            "token_logprobs": list(values),
            "top_logprobs": by_name,
            "text_offset": offsets,
        }

    def _by_name(self, alternatives: Iterable[Alternative]) -> dict[str, float]:
        """Values by the tokens' names. If several ids have one name, later ones have numbers."""
        values: dict[str, float] = {}
        seen = set()
        for token, value in alternatives:
            if token in seen:
                continue
            seen.add(token)
            name = self._tokenizer.token_name(token)
            if name in values:
                name = f"token_id:{token}"
            values[name] = value
        return values

    def _chat_entry(
        self, token: int, text: str, value: float | None, top: Sequence[Alternative]
    ) -> Object:
        names = [self._chat_token(other, self._tokenizer.token_name(other), x) for other, x in top]
        return self._chat_token(token, text, value) | {"top_logprobs": names}

    def _chat_token(self, token: int, text: str, value: float | None) -> Object:
        own_bytes = self._tokenizer.bytes_of(token)
        return {"token": text, "logprob": value, "bytes": list(own_bytes)}
