"""Turns a request's body into a submission, checked against the models and the server's limits.

It knows the models and their options, but neither HTTP nor the device's thread.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infer.scoring import check_scorable
from infer.serve.engine_thread import Submission, Variant
from infer.serve.schemas import Body, ChatBody, CompletionBody
from specjax._util.checks import SEED_MAX
from specjax._util.errors import OptionError
from specjax.core import loop
from specjax.core.warp import Sampling
from specjax.lm import LM
from specjax.models.cache import bucket
from specjax.registry import MethodSpec, method
from specjax.runtime.engine import Engine
from specjax.runtime.generate import check_draft_context, encode_prompt, make_engine
from specjax.runtime.scheduler import Bounds

MAX_ENGINES = 64  # in the cache; an engine is a method with its options
MAX_ROUND_TOKENS = 128  # tokens that a method passes through the model in one round
DEFAULT_MAX_TOKENS = 16  # OpenAI's default for /v1/completions


class NoSuchModel(OptionError):
    """The request names another model than the served one."""


class TooLong(OptionError):
    """A prompt exceeds the server's limit or the model's context."""


@dataclasses.dataclass(frozen=True, eq=False)
class Admission:
    """What the server has loaded, and what a request may ask for.

    Args:
      name: what clients call the model.
      method: decodes requests that name no method, with the options ``defaults``.
      sampling: of requests, where they give no value of their own.
      size: batch slots of each method.
      max_prompt, max_output: tokens of a prompt and of a completion.
      memory: bytes that the batch slots of one method may need.
      max_rows: completions of one request.
    """

    target: LM
    draft: LM | None
    name: str
    method: str
    defaults: Mapping[str, Any]
    sampling: Sampling
    size: int
    max_prompt: int
    max_output: int
    memory: int
    max_rows: int

    @property
    def bounds(self) -> Bounds:
        """The limits that hold for every request."""
        context = self.target.config.max_position
        prompt = min(self.max_prompt, context - 1)
        return Bounds(prompt, min(prompt + self.max_output, context))

    def make_submission(self, body: Body, on_output: Callable) -> Submission:
        """The submission that a request asks for. Long texts and templates take a while.

        Args:
          body: the parsed request.
          on_output: gets the pieces of the answer, as :class:`Submission` says.

        Raises:
          SpecjaxError: a field is wrong or exceeds a limit; one line names it.
        """
        if body.model not in (None, self.name):
            raise NoSuchModel(f"model {body.model!r}: this server has {self.name!r}")
        sampling = self._sampling(body)
        self._check_scoring(body)
        variant = self._variant(body, sampling.temperature == 0)
        variant.engine.method.check_sampling(sampling)
        prompts = self._prompts(body)

        max_tokens = _max_tokens(body)
        budgets = [self._budget(variant.engine, len(prompt), max_tokens) for prompt in prompts]
        seed = secrets.randbelow(SEED_MAX + 1) if body.seed is None else body.seed
        submission = Submission(
            variant,
            prompts,
            budgets,
            body.n or 1,
            seed,
            sampling,
            body.stops,
            on_output,
            scored=body.alternatives is not None,
        )
        if submission.size > self.max_rows:
            raise OptionError(f"{submission.size} completions at once: at most {self.max_rows}")
        return submission

    def _sampling(self, body: Body) -> Sampling:
        """A request's sampling: its own values, else the server's."""
        values = {"temperature": body.temperature, "top_k": body.top_k, "top_p": body.top_p}
        given = {name: value for name, value in values.items() if value is not None}
        return dataclasses.replace(self.sampling, **given)

    def _check_scoring(self, body: Body) -> None:
        """Refuses what does not work with scores, which are computed when a row has ended."""
        echo = isinstance(body, CompletionBody) and body.echo
        if body.max_tokens == 0 and not echo:
            raise OptionError("max_tokens=0 generates nothing: it needs echo")
        if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
            raise OptionError("top_logprobs needs logprobs")
        if body.alternatives is not None:
            check_scorable(self.target)

    # --- prompts and budgets -------------------------------------------------------------------

    def _prompts(self, body: Body) -> list[np.ndarray]:
        if isinstance(body, ChatBody):
            return [self._encode(self._chat_ids(body), "messages")]
        assert isinstance(body, CompletionBody)  # the only other kind
        if body.best_of not in (None, body.n or 1):
            raise OptionError(
                f"best_of={body.best_of}: expected n, completions are not ranked; leave it out"
            )
        return [self._encode(prompt, "prompt") for prompt in body.prompts]

    def _chat_ids(self, body: ChatBody) -> list[int]:
        """The token ids of a conversation, through the model's chat template."""
        tokenizer = self.target.tokenizer
        if not tokenizer.chats:
            raise OptionError("this model has no chat template: use /v1/completions")
        messages = [message.plain() for message in body.messages]
        return tokenizer.encode_chat(messages, body.chat_template_kwargs)

    def _encode(self, prompt: str | list[int], field: str) -> np.ndarray:
        if isinstance(prompt, str):
            prompt = self.target.tokenizer.encode(prompt)
        if len(prompt) > self.bounds.prompt:
            raise TooLong(f"{field} has {len(prompt)} tokens: at most {self.bounds.prompt}")
        return encode_prompt(self.target, prompt, field)

    def _budget(self, engine: Engine, length: int, max_tokens: int | None) -> int:
        """How many new tokens a prompt of ``length`` tokens gets; None: as many as limits allow."""
        context = self.target.config.max_position
        shortest = context
        if engine.draft:
            shortest = min(context, engine.draft.config.max_position)
        if max_tokens is None:
            max_tokens = max(1, min(self.max_output, shortest - length))

        if max_tokens > self.max_output:
            raise OptionError(f"max_tokens={max_tokens}: at most {self.max_output}")
        if length + max_tokens > context:
            raise TooLong(
                f"{length} prompt tokens and {max_tokens} new ones: the context holds {context}"
            )
        if engine.draft:
            check_draft_context(engine.draft, length, max_tokens)
        return max_tokens

    # --- methods -------------------------------------------------------------------------------

    def _variant(self, body: Body, greedy: bool) -> Variant:
        """The method that a request asks for, with its options."""
        name = body.method or self.method
        options: dict[str, Any] = {}
        if name == self.method:
            options |= self.defaults
        options |= body.options or {}
        for key, value in options.items():
            if isinstance(value, list):  # the cache of engines needs values that hash
                options[key] = tuple(value)
        items = tuple(options.items())
        # Scores include the tokens' log-probabilities, so decoding need not compute them.
        logprobs = body.wants_logprobs and body.alternatives is None
        return Variant(name, self._engine(name, items, greedy), logprobs)

    @functools.cached_property
    def _engine(self) -> Callable[[str, Hashable, bool], Engine]:
        """:meth:`_make_engine`, with a cache of the last results."""
        # typed: 1, 1.0 and True are equal, but not the same option value.
        return functools.lru_cache(MAX_ENGINES, typed=True)(self._make_engine)

    def _make_engine(self, name: str, options: tuple, greedy: bool) -> Engine:
        spec: MethodSpec = method(name)
        if spec.needs_reward:
            raise OptionError(f"method {name} needs a reward, and this server has none")
        engine = make_engine(self.target, self.draft, spec, dict(options), greedy)
        if engine.method.round_positions > MAX_ROUND_TOKENS:
            raise OptionError(
                f"method {name} with these options needs {engine.method.round_positions} tokens "
                f"per round: at most {MAX_ROUND_TOKENS}"
            )
        needed = self._bytes(engine)
        if needed > self.memory:
            raise OptionError(
                f"method {name} with these options needs {needed / 2**30:.1f} GiB for "
                f"{self.size} rows: at most {self.memory / 2**30:.1f}"
            )
        return engine

    def _bytes(self, engine: Engine) -> int:
        """The most bytes that all batch slots of a method can need, from shapes alone."""
        capacity = bucket(self.bounds.total + engine.method.round_positions)
        tokens = jax.ShapeDtypeStruct((self.size, capacity), jnp.int32)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), self.size))
        empty = loop.empty_state(engine.method, True)
        state = jax.eval_shape(empty, engine.inputs(Sampling(), self.size), tokens, keys)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def _max_tokens(body: Body) -> int | None:
    """The number of new tokens that a request asks for; None leaves it to the server's limits."""
    if isinstance(body, ChatBody):
        if body.max_completion_tokens is not None:
            return body.max_completion_tokens
        return body.max_tokens  # OpenAI's former name for it
    if body.max_tokens is None:
        return DEFAULT_MAX_TOKENS
    # An echo alone asks for 0, but every row decodes at least one token.
    return max(1, body.max_tokens)
