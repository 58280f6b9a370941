"""The host side of decoding: prompts of a batch in, rounds on the device, pieces of text out.

It prepares arrays, calls the device loop in chunks of rounds, and turns what comes back into
text; it never looks at the device once per token.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax.lm import LM
from specjax.mesh import DATA
from specjax.models.cache import chunk_width
from specjax.output import Generation, Piece, Reader
from specjax.protocols import Method
from specjax.rewards import Judge
from specjax.search.drivers import advance_hosted
from specjax.types import FINISH_REASONS, DecodeState, Inputs
from specjax.warp import Sampling

NO_EOS = -1  # pads the eos array: no token has this id


@dataclasses.dataclass(frozen=True)
class Engine:
    """A method bound to its models: what every batch of a job shares."""

    target: LM
    draft: LM | None
    method: Method
    settings: dict[str, float]
    judge: Judge | None = None

    def inputs(self, sampling: Sampling, batch: int, cases: Sequence[int] = ()) -> Inputs:
        """Params and settings as the step reads them; ``cases`` are the rows' numbers."""
        target, eos = self.target.net, list(self.target.eos_ids) or [NO_EOS]
        return Inputs(
            target=target,
            draft=self.draft.net.over(target) if self.draft else None,
            warp=sampling.arrays(batch),
            eos_ids=jnp.asarray(eos + [NO_EOS] * (-len(eos) % 4), jnp.int32),
            settings={n: jnp.asarray(v, jnp.float32) for n, v in self.settings.items()},
            reward=self.judge.rows(cases) if self.judge else (),
            mesh=self.target.mesh,
        )

    def chunk(self, longest: int, rows: int) -> int:
        """Tokens per prefill pass of a batch of ``rows``, by its longest prompt."""
        share = 1 if self.target.mesh is None else self.target.mesh.shape[DATA]
        return chunk_width(longest, rows // share, self.target.config.num_heads)


@dataclasses.dataclass(frozen=True)
class Row:
    """One sample of one prompt. ``case`` is the row's number in the job; ``prompt`` (its text)
    and ``constraints`` are what rewards read."""

    tokens: np.ndarray
    budget: int
    key: jax.Array
    case: int = 0
    prompt: str = ""
    constraints: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)


class Batch:
    """Rows decoded together. Short batches are padded with rows that are done from the start."""

    def __init__(
        self,
        engine: Engine,
        rows: list[Row],
        size: int,
        sampling: Sampling,
        stop: tuple[str, ...],
        logprobs: bool,
        carried: Any = (),
    ):
        self._engine, self._rows, self._stop, self._logprobs = engine, rows, stop, logprobs
        padding = [Row(np.zeros(1, np.int32), 0, rows[0].key)] * (size - len(rows))
        self._all = rows + padding
        self._inputs = engine.inputs(sampling, size, [row.case for row in self._all])
        self._shown = np.array([len(row.tokens) for row in self._all])
        self._readers = [Reader(engine.target.tokenizer, stop) for _ in rows]
        self._times = {"prefill": 0.0, "first": 0.0, "total": 0.0}
        self.carried = carried  # from batch to batch: what the method remembers of the job

    def run(self, rounds: int) -> Iterator[Piece]:
        """Decodes, yielding what is new after every ``rounds`` rounds."""
        began = time.perf_counter()
        method, inputs = self._engine.method, self._inputs
        prompts = [row.tokens for row in self._all]
        state = decode.start(
            method,
            inputs,
            prompts,
            np.array([row.budget for row in self._all], np.int32),
            jnp.stack([row.key for row in self._all]),
            logprobs=self._logprobs,
            chunk=self._engine.chunk(max(map(len, prompts)), len(prompts)),
            carried=self.carried,
        )
        jax.block_until_ready(state)
        self._times["prefill"] = time.perf_counter() - began
        # One round first: it dates the first token.
        step = 1
        while True:
            state = self._advance(state, step)
            finish = np.asarray(state.finish)
            self._times["total"] = time.perf_counter() - began
            if step == 1 and not self._times["first"]:
                self._times["first"] = self._times["total"]
            stopped, pieces = self._read(state, finish)
            yield from pieces
            if stopped.any():
                state = decode.mark_stopped(state, jnp.asarray(stopped))
                finish = np.asarray(state.finish)
            if finish.all():
                break
            # Text stops are only seen here, and counters must not run past them.
            step = 1 if self._stop else rounds
        self.carried = method.carry(state)
        rest = dict.fromkeys(("keys", "cache", "target_state", "drafter_state", "method_state"))
        self._state = jax.device_get(state.replace(**rest))

    def _advance(self, state: DecodeState, rounds: int) -> DecodeState:
        engine = self._engine
        if not engine.method.hosted:
            return decode.advance(engine.method, self._inputs, state, rounds)
        state = decode.make_room(engine.method, state)

        def score(state, lanes):
            return engine.judge.lanes(self._all, state, lanes)

        return advance_hosted(engine.method, self._inputs, state, rounds, score)

    def _rewards(self, tokens: list[np.ndarray]) -> np.ndarray | None:
        """Each reward of each whole completion, a stop string and what follows it cut off."""
        judge = self._engine.judge
        if judge is None:
            return None
        samples = [
            dataclasses.replace(judge.sample(row, own), text=reader.text)
            for row, own, reader in zip(self._rows, tokens, self._readers, strict=True)
        ]
        return np.array(judge.scores(samples), np.float64)

    def _read(self, state: DecodeState, finish: np.ndarray) -> tuple[np.ndarray, list[Piece]]:
        length, tokens, origin = jax.device_get((state.length, state.tokens, state.origin))
        stopped, pieces = np.zeros(len(self._all), bool), []
        for i, reader in enumerate(self._readers):
            fresh = slice(self._shown[i], length[i])
            ended = bool(finish[i])
            if reader.closed or (fresh.start == fresh.stop and not ended):
                continue
            text, kept = reader.read(tokens[i, fresh], ended)
            stopped[i] = reader.stopped
            reason = FINISH_REASONS[finish[i]] if ended else None
            new = slice(fresh.start, fresh.start + kept)
            pieces.append(
                Piece(i, text, tokens[i, new], origin[i, new], "stop" if reader.stopped else reason)
            )
            self._shown[i] = length[i]
        return stopped, pieces

    def result(self, number: int) -> Generation:
        """The finished rows of batch ``number``; call it after :meth:`run` is exhausted."""
        count, state = len(self._rows), self._state
        spans = [
            slice(int(n), int(n) + reader.count)
            for n, reader in zip(state.prompt_length, self._readers, strict=False)
        ]

        def cut(values):
            return [values[i, span].copy() for i, span in enumerate(spans)]

        counters = dict(vars(state.stats))
        passes = int(counters.pop("passes"))
        stats = {name: values[:count].copy() for name, values in counters.items()}
        stats["emitted"] = np.array([reader.count for reader in self._readers])
        times, tokens = self._times, cut(state.tokens)
        return Generation(
            text=[reader.text for reader in self._readers],
            tokens=tokens,
            finish_reasons=[FINISH_REASONS[f] for f in state.finish[:count]],
            origins=cut(state.origin),
            logprobs=None if state.logprobs is None else cut(state.logprobs),
            prompt_tokens=[len(row.tokens) for row in self._rows],
            stats=stats,
            prefill_seconds=np.full(count, times["prefill"]),
            first_token_seconds=np.full(count, times["first"]),
            decode_seconds=np.full(count, times["total"] - times["prefill"]),
            batch=np.full(count, number),
            passes=passes,
            rewards=self._rewards(tokens),
        )
