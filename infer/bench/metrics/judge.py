"""``judge``: another model's opinion, through any endpoint that speaks OpenAI's protocol.

Off unless ``--judge-url`` names the endpoint's base, such as ``http://127.0.0.1:8000/v1``: prompts
and completions are sent to it. The key in ``SPECJAX_JUDGE_KEY`` is sent to that host alone, as no
redirect is followed, and never shown.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from infer.bench.metrics.protocol import Completion, PerCompletion, need_references
from infer.bench.metrics.settings import Settings
from specjax._util.errors import OptionError
from specjax._util.program import say

SECONDS, MOST_BYTES, AT_ONCE = 120.0, 1 << 22, 4
PAUSES = (1.0, 5.0)  # seconds before an endpoint that is busy is asked again
RATE = """Rate the answer to the question below for helpfulness, relevance, correctness and depth.
Explain briefly, then end with the rating, a number from 1 to 10, in double brackets: [[5]].

[Question]
{prompt}

[Answer]
{text}"""
COMPARE = """Which of two answers to the question below is better? Judge helpfulness, relevance,
correctness and depth, neither length nor order. Explain briefly, then end with [[A]], [[B]], or
[[C]] where they are as good as each other.

[Question]
{prompt}

[Answer A]
{a}

[Answer B]
{b}"""
WORTH = {"A": 1.0, "B": 0.0, "C": 0.5}


class ChatJudge(PerCompletion):
    """The mean rating, 1 to 10; of ``pair`` how often ours is preferred to the first reference.

    A pair is asked about twice, in both orders, and a tie counts half. An answer without a verdict
    is no score.
    """

    def __init__(self, pair: bool, endpoint: Endpoint):
        self._pair, self._endpoint = pair, endpoint
        self.columns = {"win_rate": "wins"} if pair else {"rating": "rating, 1–10"}

    def check(self, prompts: Sequence[Completion]) -> None:
        if self._pair:
            need_references("judge:pair", prompts)
        self._endpoint.ask("Say [[5]].")  # no judge is found before the work, not after it

    def scores(self, done: Sequence[Completion]) -> list[list[float | None]]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            values = list(pool.map(self._score, done))
        if silent := [str(value) for value in values if isinstance(value, OptionError)]:
            say("infer.bench", f"{len(silent)} of {len(done)} are not judged: {silent[0]}")
        return [[None if isinstance(value, OptionError) else value] for value in values]

    def _score(self, one: Completion) -> float | OptionError | None:
        """A judge that falls silent in the middle costs these scores, not all that was decoded."""
        try:
            return self._win(one) if self._pair else self._rating(one)
        except OptionError as error:
            return error

    def _rating(self, one: Completion) -> float | None:
        return rating(self._endpoint.ask(RATE.format(prompt=one.prompt, text=one.text)))

    def _win(self, one: Completion) -> float | None:
        ours, theirs = one.text, one.reference
        first, second = (
            winner(self._endpoint.ask(COMPARE.format(prompt=one.prompt, a=a, b=b)))
            for a, b in ((ours, theirs), (theirs, ours))
        )
        return None if first is None or second is None else (first + 1 - second) / 2


def rating(answer: str) -> float | None:
    """The last number in double brackets, if it is from 1 to 10."""
    found = re.findall(r"\[\[\s*([0-9]{1,2}(?:\.[0-9]+)?)\s*\]\]", answer)
    value = float(found[-1]) if found else 0.0
    return value if 1 <= value <= 10 else None


def winner(answer: str) -> float | None:
    """What A is worth by the last verdict in double brackets."""
    found = re.findall(r"\[\[([ABC])\]\]", answer)
    return WORTH[found[-1]] if found else None


class JudgeBusy(OptionError):
    """An endpoint that may answer later."""


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows nothing: the key is for one host."""

    def redirect_request(self, *args):
        return None


class Endpoint:
    """``/chat/completions`` below a base URL, asked greedily."""

    def __init__(self, url: str, model: str, key: str | None):
        self._url, self._model, self._key = url.rstrip("/"), model, key
        self._opener = urllib.request.build_opener(_Stay)

    def ask(self, prompt: str) -> str:
        """The answer's text; a busy endpoint is asked again.

        Raises:
          OptionError: no answer in time, or none of the protocol.
        """
        for pause in PAUSES:
            try:
                return self._ask(prompt)
            except JudgeBusy:
                time.sleep(pause)
        return self._ask(prompt)

    def _ask(self, prompt: str) -> str:
        said = {"model": self._model, "messages": [{"role": "user", "content": prompt}]}
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(
            f"{self._url}/chat/completions",
            json.dumps(said | {"temperature": 0, "max_tokens": 1024}).encode(),
            headers,
        )
        try:
            with self._opener.open(request, timeout=SECONDS) as answer:
                content = json.loads(answer.read(MOST_BYTES))["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            kind = JudgeBusy if error.code in (429, 500, 502, 503) else OptionError
            raise self._silent(f"HTTP {error.code}", kind) from None
        except (OSError, ValueError, urllib.error.URLError) as error:
            raise self._silent(str(getattr(error, "reason", error))) from None
        except (LookupError, TypeError):
            raise self._silent("no chat completion") from None
        return content or ""

    def _silent(self, why: str, kind: type[OptionError] = OptionError) -> OptionError:
        return kind(f"--judge-url {self._url}: the judge does not answer ({why})")


def make(argument: str, settings: Settings) -> ChatJudge:
    """The metric; ``argument`` is empty or ``pair``."""
    if argument not in ("", "pair"):
        raise OptionError(f"--metric judge:{argument}: expected judge or judge:pair")
    if not settings.judge_url or not settings.judge_model:
        raise OptionError("--metric judge needs --judge-url URL and --judge-model NAME")
    parts = urllib.parse.urlsplit(settings.judge_url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise OptionError("--judge-url: expected http://HOST:PORT/v1 or https, without a password")
    return ChatJudge(
        argument == "pair", Endpoint(settings.judge_url, settings.judge_model, settings.judge_key)
    )
