"""CDLH, CDLH-appx and CDSL in plain Python: lists, no cache, no batch. What the tests compare to.

Written from the algorithms (Nakshatri et al. 2025, Algorithms 1 and 2, with the corrections that
the method pages state), not from the code under test.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

from specjax.core import probs
from specjax.models import hidden_states, logits_of

COUNTERS = ("target_calls", "draft_calls", "rounds", "drafted", "tested", "accepted", "emitted")
Reward = Callable[[list[int]], float]


class Model:
    """Next-token logits of any prefix, by a whole forward pass of one padded shape."""

    def __init__(self, lm, limit: int, capacity: int):
        self._lm, self._limit, self._capacity, self._known = lm, limit, capacity, {}

        @jax.jit
        def logits(params, tokens, last):
            at = np.arange(capacity)[None]
            hidden = hidden_states(lm.config, params, tokens, at, np.ones_like(at)).hidden
            return logits_of(lm.config, params, hidden[:, last][:, None])[0, 0]

        self._logits = logits

    def __call__(self, prefix: Sequence[int]) -> np.ndarray:
        prefix = tuple(prefix)
        if prefix not in self._known:
            padded = np.zeros((1, self._capacity), np.int32)
            padded[0, : len(prefix)] = prefix
            logits = np.asarray(self._logits(self._lm.params, padded, len(prefix) - 1), np.float32)
            logits = logits[: self._limit]
            total = np.log(np.exp(logits - logits.max()).sum())
            self._known[prefix] = logits - (logits.max() + total)
        return self._known[prefix]

    def greedy(self, prefix: Sequence[int]) -> int:
        return int(self(prefix).argmax())


class Run:
    """One prompt through one method; ``tokens``, ``counters`` and ``states`` are the result."""

    def __init__(
        self,
        target: Model,
        draft: Model,
        eos: Sequence[int],
        reward: Reward,
        prompt: Sequence[int],
        budget: int,
        *,
        k=3,
        d=3,
    ):
        self.p, self.q, self.eos, self.reward = target, draft, set(eos), reward
        self.prompt, self.budget, self.k, self.d = list(prompt), budget, k, d
        self.tokens: list[int] = []
        self.counters = collections.Counter(dict.fromkeys(COUNTERS, 0))
        self.states: list[str] = []
        self.ends: set[str] = set()  # where EOS occurred: in a draft, a lookahead or an attempt

    @property
    def running(self) -> bool:
        return len(self.tokens) < self.budget and not (self.tokens and self.tokens[-1] in self.eos)

    def emit(self, tokens: list[int]) -> None:
        for token in tokens:
            if self.running:
                self.tokens.append(token)
                self.counters["emitted"] += 1
        self.counters["rounds"] += 1

    def worth(self, path: list[int]) -> float:
        value = self.reward(self.tokens + path)
        return -math.inf if math.isnan(value) else value

    def roll(self, model: Model, path: list[int], name: str, call: str) -> list[int]:
        """The path and up to d greedy tokens after it."""
        path = list(path)
        for _ in range(self.d):
            if path and path[-1] in self.eos:
                self.ends.add(name)
                break
            path.append(model.greedy(self.prompt + self.tokens + path))
            self.counters[call] += 1
        return path

    def look(self, path: list[int], model: Model, call: str) -> int:
        """The token with the best lookahead reward, of the k likeliest after the path."""
        logits = self.p(self.prompt + self.tokens + path)
        best, chosen = -math.inf, None
        for token in np.argsort(-logits, kind="stable")[: self.k].tolist():
            value = self.worth(self.roll(model, [*path, token], "lookahead", call))
            if chosen is None or value > best:
                best, chosen = value, token
        return chosen

    def cdlh(self) -> Run:
        return self._each(self.p, "target_calls")

    def cdlh_appx(self) -> Run:
        return self._each(self.q, "draft_calls")

    def _each(self, model: Model, call: str) -> Run:
        while self.running:
            self.counters["target_calls"] += 1
            self.emit([self.look([], model, call)])
        return self

    def cdsl(self, key, *, b=1, a_t=0.3, r_t=0.3, accept="hard", keep_verified=True) -> Run:
        a_t, r_t = np.float32(a_t), np.float32(r_t)
        while self.running:
            self.counters["target_calls"] += 1
            round_key = jax.random.fold_in(key, self.counters["rounds"])
            self.emit(self._round(round_key, b, a_t, r_t, accept, keep_verified))
        return self

    def _round(self, key, b, a_t, r_t, accept, keep_verified) -> list[int]:
        draft = self.roll(self.q, [], "draft", "draft_calls")
        n = 0
        while n < len(draft) and self._passes(key, draft, n, accept):
            n += 1
        self.counters["drafted"] += len(draft)
        self.counters["accepted"] += n
        self.counters["tested"] += min(n + 1, len(draft))
        agreed = np.float32(n) / np.float32(len(draft)) >= a_t
        good = self.worth(draft[:n]) >= r_t
        self.states.append(("S1" if good else "S4") if agreed else ("S3" if good else "S2"))
        if agreed and good and n > 0:
            return draft[:n]
        path = draft[:n] if keep_verified or (agreed and good) else []
        if path and path[-1] in self.eos:
            self.ends.add("draft")
            return path
        if not agreed:
            tried = list(path)
            for i in range(b):
                self.counters["target_calls"] += i > 0
                tried.append(self.p.greedy(self.prompt + self.tokens + tried))
                if self.worth(self.roll(self.q, tried, "attempt", "draft_calls")) >= r_t:
                    return tried
                if tried[-1] in self.eos:
                    break
        return [*path, self.look(path, self.q, "draft_calls")]

    def _passes(self, key, draft, n, accept) -> bool:
        prefix, x = self.prompt + self.tokens + draft[:n], draft[n]
        if accept == "hard":
            return self.p.greedy(prefix) == x
        at = np.full((1, 1), n + 1)
        u = float(probs.uniforms(key[None], probs.Purpose.ACCEPT, at)[0, 0])
        log_ratio = self.p(prefix)[x] - (self.q(prefix)[x] if accept == "ratio" else 0.0)
        return math.log(u) <= log_ratio
