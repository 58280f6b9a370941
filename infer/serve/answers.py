"""Pieces of rows as OpenAI's objects: completions and chats, whole or in chunks."""

from __future__ import annotations

import itertools
import time
import uuid
from typing import Any

import numpy as np

from infer.authors import Authors
from infer.scoring import PromptScores
from infer.serve.engine_thread import Submission
from infer.serve.schemas import Body, ChatBody
from specjax.core.types import FROM_DRAFT
from specjax.metrics import rates, ratio
from specjax.runtime.output import Generation, Piece
from specjax.text.tokenizer import Tokenizer

REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
COUNTERS = ("drafted", "tested", "accepted", "emitted", "rounds", "target_calls", "draft_calls")
# Of an id that no tokenizer knows: JSON has no infinity.
FLOOR = -9999.0

Object = dict[str, Any]


class Answer:
    """One request's answer, as its pieces come."""

    def __init__(self, work: Submission, body: Body, model: str):
        self._work, self._model, self._body = work, model, body
        self._chat = isinstance(body, ChatBody)
        self._id = ("chatcmpl-" if self._chat else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())
        self._tokenizer: Tokenizer = work.variant.engine.target.tokenizer
        self._rows: list[Generation | None] = [None] * work.size
        self._scores: list[PromptScores | None] = [None] * work.size
        self._echo = not self._chat and bool(body.echo)
        self._silent = body.max_tokens == 0  # a token was written for nothing
        self._authors = [Authors(self._tokenizer) for _ in self._rows] if body.origins else None
        self._runs: list[list] = [[] for _ in self._rows]
        self._offsets = [0] * work.size
        self._begun: set[int] = set()
        self._first = self._last = 0.0
        self._early = 0  # tokens that came with the first pieces

    @property
    def complete(self) -> bool:
        """Whether every row has ended."""
        return all(self._rows)

    def take(self, number: int, piece: Piece) -> Object | None:
        """The chunk that a piece makes; None where it shows nothing new."""
        self._last = time.perf_counter()
        if not self._first:
            self._first, self._early = self._last, len(piece.tokens)
        runs = self._authors[number].runs(piece) if self._authors else None
        if runs:
            self._runs[number] += [[text, _author(origin)] for text, origin in runs]
        self._rows[number] = piece.row
        self._scores[number] = getattr(piece, "scores", None)
        if not (piece.text or piece.finish_reason or piece.logprobs is not None):
            return None
        delta = {"content": piece.text}
        if number not in self._begun:
            self._begun.add(number)
            delta = {"role": "assistant"} | delta
        said = {"delta": delta} if self._chat else {"text": piece.text}
        choice = self._choice(number, said, piece.tokens, piece.logprobs, piece.finish_reason)
        if runs is not None:
            choice["origins"] = [[text, _author(origin)] for text, origin in runs]
        return self._object([choice], chunk=True)

    def whole(self) -> Object:
        """The answer to a request that does not stream."""
        choices = []
        for number, row in enumerate(self._rows):
            text = "" if self._silent else row.text[0]
            if self._echo:
                text = self._prompt(number) + text
            said = {"message": {"role": "assistant", "content": text}}
            said = said if self._chat else {"text": text}
            logprobs = row.logprobs and row.logprobs[0]
            self._offsets[number] = 0
            reason = "length" if self._silent else row.finish_reasons[0]
            choice = self._choice(number, said, row.tokens[0], logprobs, reason)
            if self._scores[number] is not None:
                choice["logprobs"] = self._alternatives(number)
            if self._authors:
                choice["origins"] = [] if self._silent else self._runs[number]
            choices.append(choice)
        return self._object(choices, chunk=False) | {"usage": self._usage()}

    def last(self) -> Object | None:
        """The chunk after all others, with the usage, where it was asked for."""
        options = self._body.stream_options
        if not (options and options.include_usage):
            return None
        return self._object([], chunk=True) | {"usage": self._usage()}

    def _object(self, choices: list[Object], chunk: bool) -> Object:
        kind = "text_completion"
        if self._chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return head | {"choices": choices}

    def _choice(self, number, said: Object, tokens, logprobs, reason: str | None) -> Object:
        shown = None if logprobs is None else self._logprobs(number, tokens, logprobs)
        rest = {"logprobs": shown, "finish_reason": REASONS.get(reason)}
        return {"index": number} | said | rest

    def _logprobs(self, number: int, tokens: np.ndarray, logprobs: np.ndarray) -> Object:
        """Of the written tokens under the unwarped target, in nats."""
        texts = [self._tokenizer.decode([token], False) for token in tokens]
        values = [float(value) for value in logprobs]
        if self._chat:
            return self._chat_logprobs(texts, values, [[]] * len(texts))
        offsets = []
        for text in texts:
            offsets.append(self._offsets[number])
            self._offsets[number] += len(text)
        shape = {"tokens": texts, "token_logprobs": values, "top_logprobs": None}
        return shape | {"text_offset": offsets}

    def _chat_logprobs(self, texts, values, tops) -> Object:
        def entry(text: str, value: float) -> Object:
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        content = [
            entry(text, value) | {"top_logprobs": [entry(*other) for other in top]}
            for text, value, top in zip(texts, values, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _prompt(self, number: int) -> str:
        """A row's prompt as it was sent; token ids as their text."""
        prompt = self._body.prompts[number // self._work.samples]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _alternatives(self, number: int) -> Object:
        """Log-probabilities with what else might have stood there, of the prompt with ``echo``."""
        row, scores = self._rows[number], self._scores[number]
        prompt = self._work.prompts[number // self._work.samples]
        written = row.tokens[0][:0] if self._silent else row.tokens[0]
        ids = [*prompt, *written]
        most = self._body.alternatives
        # The first token stands after nothing: it has no probability.
        values = [None, *(max(float(x), FLOOR) for x in scores.log_probs[: len(ids) - 1])]
        tops = [None, *(self._top(scores, at, most) for at in range(len(ids) - 1))]
        shown = slice(0 if self._echo else len(prompt), None)
        texts = [self._tokenizer.decode([token], False) for token in ids[shown]]
        values, tops = values[shown], tops[shown]
        if self._chat:
            return self._chat_logprobs(texts, values, tops)
        # As OpenAI has it the token itself is among its alternatives.
        named = [
            None if top is None else dict([(text, value), *reversed(top)])
            for text, value, top in zip(texts, values, tops, strict=True)
        ]
        shape = {"tokens": texts, "token_logprobs": values}
        shape["top_logprobs"] = named if most else None
        starts = itertools.accumulate(map(len, texts), initial=0)
        return shape | {"text_offset": list(starts)[:-1]}

    def _top(self, scores: PromptScores, at: int, most: int) -> list[tuple[str, float]]:
        """The most likely tokens at a place, with their log-probabilities, in falling order."""
        each = zip(scores.top_ids[at, :most], scores.top_log_probs[at, :most], strict=True)
        finite = [(token, float(value)) for token, value in each if np.isfinite(value)]
        return [(self._tokenizer.decode([token], False), value) for token, value in finite]

    def _usage(self) -> Object:
        """Tokens as OpenAI counts them, and what decoding them took."""
        each = self._work.samples
        prompts = sum(row.prompt_tokens[0] for row in self._rows[::each])
        written = 0 if self._silent else sum(len(row.tokens[0]) for row in self._rows)
        cached = sum(row.cached_tokens[0] for row in self._rows[::each])
        return {
            "prompt_tokens": prompts,
            "completion_tokens": written,
            "total_tokens": prompts + written,
            "prompt_tokens_details": {"cached_tokens": cached},
            "decoding": self._decoding(written),
        }

    def _decoding(self, written: int) -> Object:
        counters = {name: sum(int(row.stats[name][0]) for row in self._rows) for name in COUNTERS}
        derived = rates(counters)
        after = self._last - self._first
        return {
            "method": self._work.variant.name,
            "seed": self._work.seed,
            "acceptance_rate": derived["acceptance_rate"],
            "target_passes": counters["target_calls"],
            "draft_passes": counters["draft_calls"],
            "tokens_per_target_pass": derived["tokens_per_target_call"],
            "drafted": counters["drafted"],
            "tested": counters["tested"],
            "accepted": counters["accepted"],
            "rounds": counters["rounds"],
            "seconds": self._last - self._work.arrived,
            "first_token_seconds": self._first - self._work.arrived,
            "tokens_per_second": ratio(written - self._early, after),
        }


def _author(origin: int) -> str:
    return "draft" if origin == FROM_DRAFT else "target"
