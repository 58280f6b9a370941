"""Builds OpenAI's response objects, for completions and chats, whole or as stream chunks.

It turns pieces of rows into dicts. It does not know HTTP, threads or the device.

Axis legend: T tokens of a row, K alternatives to a token.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import numpy as np

from infer.authors import Authors, Run
from infer.scoring import PromptScores
from infer.serve.logprobs import LOWEST_LOGPROB, Alternative, Object, RowLogprobs
from infer.serve.schemas import Body, ChatBody
from infer.serve.tools.families import find_family
from infer.serve.tools.reading import AnswerReader
from infer.serve.variants import Submission
from infer.serve.vllm_metrics import acceptance
from specjax.core.types import FROM_DRAFT
from specjax.metrics import rates, ratio
from specjax.runtime.output import Generation, Piece
from specjax.text.tokenizer import Tokenizer

REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
COUNTERS = ("drafted", "tested", "accepted", "emitted", "rounds", "target_calls", "draft_calls")


class Answer:
    """The answer to one request, built from pieces as they come."""

    def __init__(
        self, submission: Submission, body: Body, model: str, tool_family: str | None = None
    ):
        self._submission = submission
        self._body = body
        self._model = model

        self._chat = isinstance(body, ChatBody)
        prefix = "chatcmpl" if self._chat else "cmpl"
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._tokenizer: Tokenizer = submission.variant.engine.target.tokenizer

        # By row: its generation and scores once it has ended, and who wrote its text.
        size = submission.size
        self._rows: list[Generation | None] = [None] * size
        self._scores: list[PromptScores | None] = [None] * size
        self._authors: list[Authors] | None = None
        if body.origins:
            prompts = [submission.prompt_of(number) for number in range(size)]
            self._authors = [Authors(self._tokenizer, prompt) for prompt in prompts]
        self._origins: list[list] = [[] for _ in range(size)]
        self._begun: set[int] = set()  # rows that have sent a chunk
        self._readers: list[AnswerReader] | None = None  # by row, of calls of tools
        if isinstance(body, ChatBody) and body.offered_tools:
            family = find_family(tool_family)
            self._readers = [
                AnswerReader(self._tokenizer, family, submission.prompt_of(number), body)
                for number in range(size)
            ]

        self._echo = not self._chat and bool(body.echo)
        # With max_tokens=0 one token is decoded all the same, and not shown.
        self._hide_completion = body.max_tokens == 0
        self._logprobs = [self._new_logprobs(number) for number in range(size)]  # of chunks

        self._written = 0  # tokens in the chunks so far
        self._first_time = 0.0
        self._last_time = 0.0
        self._first_tokens = 0  # tokens of the first piece, which the speed leaves out

    @property
    def complete(self) -> bool:
        """Whether every row has ended."""
        return all(self._rows)

    # --- the objects that a client gets --------------------------------------------------------

    def add_piece(self, number: int, piece: Piece) -> Object | None:
        """Adds a row's next piece; returns its stream chunk, or None if it shows nothing new."""
        self._written += len(piece.tokens)
        self._last_time = time.perf_counter()
        if not self._first_time:
            self._first_time = self._last_time
            self._first_tokens = len(piece.tokens)

        origins = None
        if self._authors:
            origins = _origins(self._authors[number].runs(piece))
            self._origins[number] += origins
        self._rows[number] = piece.row  # None before the row's last piece
        # Only a ScoredPiece has scores.
        self._scores[number] = getattr(piece, "scores", None)

        delta = self._delta(number, piece)
        if not (delta or piece.finish_reason or piece.logprobs is not None):
            return None
        shown = None
        if self._scores[number] is not None:
            shown = self._scored_logprobs(number)
        elif piece.logprobs is not None and not self._submission.scored:
            shown = self._logprobs[number].add(
                piece.tokens.tolist(),
                piece.logprobs.tolist(),
                [[]] * len(piece.tokens),
                last=piece.finish_reason is not None,
                text_length=None if piece.row is None else len(piece.row.text[0]),
            )
        content = self._chunk_content(number, delta)
        choice = self._choice(number, content, shown, piece.finish_reason)
        if origins is not None:
            choice["origins"] = [] if self._hide_completion else origins
        chunk = self._response([choice], chunk=True)
        options = self._body.stream_options
        if options and options.continuous_usage_stats:
            chunk["usage"] = self._usage_so_far()
        return chunk

    def full_response(self) -> Object:
        """The answer to a request that does not stream."""
        choices = [self._full_choice(number) for number in range(len(self._rows))]
        return self._response(choices, chunk=False) | self._summary()

    def usage_chunk(self) -> Object | None:
        """The last chunk of a stream, with the usage; None unless the request asked for it."""
        options = self._body.stream_options
        if not (options and options.include_usage):
            return None
        return self._response([], chunk=True) | self._summary()

    # --- parts of those objects ----------------------------------------------------------------

    def _response(self, choices: list[Object], chunk: bool) -> Object:
        kind = "text_completion"
        if self._chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _delta(self, number: int, piece: Piece) -> Object:
        """What a piece adds to a message: text, and calls where there are tools."""
        if self._readers:
            return self._readers[number].add(piece)
        return {"content": piece.text} if piece.text else {}

    def _chunk_content(self, number: int, delta: Object) -> Object:
        """The text of a chunk. A row's first one names the role in a chat, or has the echo."""
        first = number not in self._begun
        self._begun.add(number)
        if self._chat:
            role = {"role": "assistant"} if first else {}
            text = {} if "tool_calls" in delta else {"content": ""}
            return {"delta": role | text | delta}
        text = "" if self._hide_completion else delta.get("content", "")
        if first and self._echo:
            text = self._prompt_text(number) + text
        return {"text": text}

    def _full_choice(self, number: int) -> Object:
        row = self._rows[number]
        text = row.text[0]
        reason = row.finish_reasons[0]
        if self._hide_completion:
            text = ""
        if self._echo:
            text = self._prompt_text(number) + text

        content = {"text": text}
        if self._chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        if self._readers:
            content["message"] |= self._readers[number].message()
        shown = None
        if self._scores[number] is not None:
            shown = self._scored_logprobs(number)
        elif row.logprobs is not None:
            tokens = row.tokens[0].tolist()
            shown = self._new_logprobs(number).add(
                tokens,
                row.logprobs[0].tolist(),
                [[]] * len(tokens),
                last=True,
                text_length=len(row.text[0]),
            )
        choice = self._choice(number, content, shown, reason)
        if self._authors:
            choice["origins"] = [] if self._hide_completion else self._origins[number]
        return choice

    def _choice(
        self, number: int, content: Object, logprobs: Object | None, reason: str | None
    ) -> Object:
        if self._hide_completion and reason is not None:
            reason = "length"
        shown = REASONS.get(reason)
        if shown == "stop" and self._readers and self._readers[number].has_calls:
            shown = "tool_calls"
        rest = {"logprobs": logprobs, "finish_reason": shown}
        return {"index": number} | content | rest

    def _prompt_text(self, number: int) -> str:
        """A row's prompt as it was sent; token ids are decoded."""
        prompt = self._body.prompts[number // self._submission.samples]
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(prompt)

    # --- log-probabilities ---------------------------------------------------------------------

    def _new_logprobs(self, number: int) -> RowLogprobs:
        """Builds a row's log-probabilities, from its first token on."""
        context = [] if self._echo else self._submission.prompt_of(number)
        return RowLogprobs(self._tokenizer, context, self._chat)

    def _scored_logprobs(self, number: int) -> Object:
        """Log-probabilities with alternatives, of the completion and, with ``echo``, the prompt."""
        scores = self._scores[number]
        prompt = self._submission.prompt_of(number)
        completion = self._rows[number].tokens[0]
        if self._hide_completion:
            completion = completion[:0]
        ids = [*map(int, prompt), *map(int, completion)]

        # The first token has nothing before it, so it has no probability. From there on, entry i of
        # the scores belongs to token i + 1.
        values: list[float | None] = [None]
        tops: list[list[Alternative]] = [[]]
        for at in range(len(ids) - 1):
            values.append(max(float(scores.log_probs[at]), LOWEST_LOGPROB))
            tops.append(self._alternatives(scores, at))

        if not self._echo:
            ids = ids[len(prompt) :]
            values = values[len(prompt) :]
            tops = tops[len(prompt) :]
        length = None
        if not self._hide_completion:
            length = len(self._rows[number].text[0])
            if self._echo:
                length += len(self._tokenizer.decode(prompt))
        logprobs = self._new_logprobs(number)
        return logprobs.add(ids, values, tops, last=True, text_length=length)

    def _alternatives(self, scores: PromptScores, at: int) -> list[Alternative]:
        """The most likely tokens at a position, in falling order."""
        count = self._body.alternatives
        ids = scores.top_ids[at, :count]
        values = scores.top_log_probs[at, :count]
        alternatives = []
        for token, value in zip(ids, values, strict=True):
            if np.isfinite(value):
                alternatives.append((int(token), float(value)))
        return alternatives

    # --- usage ---------------------------------------------------------------------------------

    def _summary(self) -> Object:
        """The usage, and as vLLM has them, the numbers of drafts of a lone completion."""
        drafts = acceptance(self._rows[0]) if len(self._rows) == 1 else None
        return {"usage": self._usage(), "metrics": {"speculative_decoding": drafts}}

    def _usage(self) -> Object:
        """Tokens as OpenAI counts them, and how decoding went."""
        samples = self._submission.samples
        first_samples = self._rows[::samples]  # a prompt counts once, not per sample
        prompt_tokens = sum(row.prompt_tokens[0] for row in first_samples)
        cached_tokens = sum(row.cached_tokens[0] for row in first_samples)
        new_tokens = 0
        if not self._hide_completion:
            new_tokens = sum(len(row.tokens[0]) for row in self._rows)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            "decoding": self._decoding(new_tokens),
        }

    def _usage_so_far(self) -> Object:
        """Tokens until now, for a chunk in the middle of a stream, as vLLM counts them."""
        prompt_tokens = sum(map(len, self._submission.prompts))
        new_tokens = 0 if self._hide_completion else self._written
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
        }

    def _decoding(self, new_tokens: int) -> Object:
        """Counters and rates, over all rows; times in seconds since the request arrived."""
        counters = {name: sum(int(row.stats[name][0]) for row in self._rows) for name in COUNTERS}
        emitted = sum(int(row.accepted_emitted[0]) for row in self._rows)
        derived = rates(counters)
        arrived = self._submission.arrived
        seconds_after_first = self._last_time - self._first_time
        return {
            "method": self._submission.variant.name,
            "seed": self._submission.seed,
            "acceptance_rate": derived["acceptance_rate"],
            "target_passes": counters["target_calls"],
            "draft_passes": counters["draft_calls"],
            "tokens_per_target_pass": derived["tokens_per_target_call"],
            "drafted": counters["drafted"],
            "tested": counters["tested"],
            "accepted": counters["accepted"],
            "accepted_emitted": 0 if self._hide_completion else emitted,
            "rounds": counters["rounds"],
            "seconds": self._last_time - arrived,
            "first_token_seconds": self._first_time - arrived,
            "tokens_per_second": ratio(new_tokens - self._first_tokens, seconds_after_first),
        }


def _origins(runs: Sequence[Run]) -> list[list[str]]:
    """Runs of text as JSON: pairs of a text and its author, ``draft`` or ``target``."""
    origins = []
    for text, origin in runs:
        author = "draft" if origin == FROM_DRAFT else "target"
        origins.append([text, author])
    return origins
