"""``judge``: another model's rating, through any endpoint with OpenAI's protocol.

``--judge-url`` is the endpoint's base, such as ``http://127.0.0.1:8000/v1``. Prompts and
completions are sent to it. The key in ``SPECJAX_JUDGE_KEY`` is sent only to that host, because no
redirect is followed, and it is never printed.
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from infer.bench.metrics.protocol import Completion, PerCompletion, need_references
from infer.bench.metrics.settings import JUDGE_KEY, Settings
from specjax._util.errors import OptionError
from specjax._util.program import say

SECONDS = 120.0  # for one answer
MAX_BYTES = 1 << 22  # of an answer
MAX_TOKENS = 1024  # of an answer
CONCURRENCY = 4  # questions that are asked at a time
PAUSES = (1.0, 5.0)  # seconds before a busy endpoint is asked again
BUSY = (429, 500, 502, 503)  # HTTP statuses after which it is asked again
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
SCORE_OF_A = {"A": 1.0, "B": 0.0, "C": 0.5}


class ChatJudge(PerCompletion):
    """The mean rating, 1 to 10; for ``pair`` how often ours is preferred to the first reference.

    A pair is judged twice, in both orders, and a tie counts half. An answer without a verdict is no
    score.
    """

    def __init__(self, pair: bool, endpoint: Endpoint):
        self._pair = pair
        self._endpoint = endpoint
        self.columns = {"win_rate": "wins"} if pair else {"rating": "rating, 1–10"}

    def check(self, prompts: Sequence[Completion]) -> None:
        if self._pair:
            need_references("judge:pair", prompts)
        self._endpoint.ask("Say [[5]].")  # a judge that does not work is noticed before decoding

    def scores(self, completions: Sequence[Completion]) -> list[list[float | None]]:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            values = list(pool.map(self._score_or_error, completions))
        errors = [value for value in values if isinstance(value, OptionError)]
        if errors:
            counted = f"{len(errors)} of {len(completions)} are not judged"
            say("infer.bench", f"{counted}: {errors[0]}")
        return [[None if isinstance(value, OptionError) else value] for value in values]

    def _score_or_error(self, one: Completion) -> float | OptionError | None:
        """The score, or why the judge did not answer.

        A judge that stops answering costs these scores, not all that was decoded.
        """
        try:
            return self._win(one) if self._pair else self._rating(one)
        except OptionError as error:
            return error

    def _rating(self, one: Completion) -> float | None:
        return rating(self._endpoint.ask(RATE.format(prompt=one.prompt, text=one.text)))

    def _win(self, one: Completion) -> float | None:
        """How often ours is preferred: 0, ½ or 1 in each order, the mean of both."""
        ours_first = self._compare(one.prompt, one.text, one.reference)
        ours_second = self._compare(one.prompt, one.reference, one.text)
        if ours_first is None or ours_second is None:
            return None
        return (ours_first + 1 - ours_second) / 2

    def _compare(self, prompt: str, a: str, b: str) -> float | None:
        """1 if the judge prefers A, 0 if B, ½ for a tie."""
        return winner(self._endpoint.ask(COMPARE.format(prompt=prompt, a=a, b=b)))


def rating(answer: str) -> float | None:
    """The last number in double brackets, if it is from 1 to 10."""
    verdicts = re.findall(r"\[\[\s*([0-9]{1,2}(?:\.[0-9]+)?)\s*\]\]", answer)
    if verdicts and 1 <= float(verdicts[-1]) <= 10:
        return float(verdicts[-1])
    return None


def winner(answer: str) -> float | None:
    """A's score by the last verdict in double brackets: 1, 0, or ½ for a tie."""
    verdicts = re.findall(r"\[\[([ABC])\]\]", answer)
    return SCORE_OF_A[verdicts[-1]] if verdicts else None


class JudgeBusy(OptionError):
    """The endpoint did not answer, but may answer later."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the key is for one host."""

    def redirect_request(self, *args):
        return None


class Endpoint:
    """``/chat/completions`` below a base URL, asked greedily."""

    def __init__(self, url: str, model: str, key: str | None):
        self._url = url.rstrip("/")
        self._model = model
        # A file's line end may have come along. http.client would show a key that it refuses.
        self._key = key.strip() if key else None
        if self._key and not (self._key.isascii() and self._key.isprintable()):
            raise OptionError(f"{JUDGE_KEY}: expected printable ASCII characters")
        self._opener = urllib.request.build_opener(_NoRedirect)

    def ask(self, prompt: str) -> str:
        """The answer's text; a busy endpoint is asked again.

        Raises:
          OptionError: there is no answer in time, or it does not follow the protocol.
        """
        for pause in PAUSES:
            try:
                return self._ask_once(prompt)
            except JudgeBusy:
                time.sleep(pause)
        return self._ask_once(prompt)

    def _ask_once(self, prompt: str) -> str:
        try:
            with self._opener.open(self._request(prompt), timeout=SECONDS) as answer:
                content = json.loads(answer.read(MAX_BYTES))["choices"][0]["message"]["content"]
        # HTTPError is an OSError, so it comes first.
        except urllib.error.HTTPError as error:
            kind = JudgeBusy if error.code in BUSY else OptionError
            raise self._no_answer(f"HTTP {error.code}", kind) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._no_answer(str(getattr(error, "reason", error))) from None
        except (LookupError, TypeError):
            raise self._no_answer("no chat completion") from None
        return content or ""

    def _request(self, prompt: str) -> urllib.request.Request:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        url = f"{self._url}/chat/completions"
        return urllib.request.Request(url, json.dumps(body).encode(), headers)

    def _no_answer(self, why: str, kind: type[OptionError] = OptionError) -> OptionError:
        return kind(f"--judge-url {self._url}: the judge does not answer ({why})")


def make(argument: str, settings: Settings) -> ChatJudge:
    """The metric; ``argument`` is empty or ``pair``."""
    if argument not in ("", "pair"):
        raise OptionError(f"--metric judge:{argument}: expected judge or judge:pair")
    if not settings.judge_url or not settings.judge_model:
        raise OptionError("--metric judge needs --judge-url URL and --judge-model NAME")
    try:
        parts = urllib.parse.urlsplit(settings.judge_url)
        _ = parts.port  # which is read here
    except ValueError as error:
        raise OptionError(f"--judge-url: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise OptionError("--judge-url: expected http://HOST:PORT/v1 or https, without a password")
    return ChatJudge(
        argument == "pair", Endpoint(settings.judge_url, settings.judge_model, settings.judge_key)
    )
