"""From a request's body to work: checked against the models, the server's defaults and limits."""

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

ENGINES = 64  # methods bound to options that are kept
WIDEST = 128  # tokens of a row in one pass
TEXT_TOKENS = 16  # new tokens of a completion that does not say: OpenAI's default


class NoSuchModel(OptionError):
    """Another model than the one that is served."""


class TooLong(OptionError):
    """A prompt that the server's limits or the model's context do not hold."""


@dataclasses.dataclass(frozen=True, eq=False)
class Admission:
    """What the server has loaded, and what it lets a request ask for.

    ``memory``: bytes that the rows in flight of one variant may take. ``defaults`` are options of
    ``method``, which decodes what names no other.
    """

    target: LM
    draft: LM | None
    name: str
    method: str
    defaults: Mapping[str, Any]
    size: int
    max_prompt: int
    max_output: int
    memory: int
    most_rows: int

    @property
    def bounds(self) -> Bounds:
        """What every request keeps to."""
        context = self.target.config.max_position
        prompt = min(self.max_prompt, context - 1)
        return Bounds(prompt, min(prompt + self.max_output, context))

    def work(self, body: Body, on_output: Callable) -> Submission:
        """The work that a request asks for. It may take a while, for texts and templates.

        Raises:
          SpecjaxError: it cannot be done; one line says why.
        """
        if body.model not in (None, self.name):
            raise NoSuchModel(f"model {body.model!r}: this server has {self.name!r}")
        sampling = Sampling(
            1.0 if body.temperature is None else body.temperature,
            body.top_k or 0,
            1.0 if body.top_p is None else body.top_p,
        )
        self._check_scoring(body)
        variant = self._variant(body, sampling.temperature == 0)
        prompts = self._prompts(body)
        asked = self._tokens_asked(body)
        work = Submission(
            variant,
            prompts,
            [self._budget(variant.engine, len(prompt), asked) for prompt in prompts],
            body.n or 1,
            secrets.randbelow(SEED_MAX + 1) if body.seed is None else body.seed,
            sampling,
            body.stops,
            on_output,
            scored=body.alternatives is not None,
        )
        if work.size > self.most_rows:
            raise OptionError(f"{work.size} completions at once: at most {self.most_rows}")
        return work

    def _check_scoring(self, body: Body) -> None:
        """Refuses what scores do not go with: they come when a row has ended."""
        echo = isinstance(body, CompletionBody) and body.echo
        if body.max_tokens == 0 and not echo:
            raise OptionError("max_tokens=0 writes nothing: it needs echo")
        if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
            raise OptionError("top_logprobs needs logprobs")
        if body.stream and (echo or body.alternatives):
            raise OptionError("echo and alternatives to tokens do not stream: leave stream out")
        if body.alternatives is not None:
            check_scorable(self.target)

    # --- prompts and budgets -------------------------------------------------------------------

    def _prompts(self, body: Body) -> list[np.ndarray]:
        if isinstance(body, ChatBody):
            return [self._encoded(self._conversation(body), "messages")]
        best_of = body.best_of if isinstance(body, CompletionBody) else None
        if best_of not in (None, body.n or 1):
            raise OptionError(f"best_of={best_of}: expected n, for nothing is ranked; leave it out")
        return [self._encoded(prompt, "prompt") for prompt in body.prompts]

    def _conversation(self, body: ChatBody) -> list[int]:
        tokenizer = self.target.tokenizer
        if not tokenizer.chats:
            raise OptionError("this model has no chat template: use /v1/completions")
        messages = [message.plain() for message in body.messages]
        text = tokenizer.apply_chat(messages, body.chat_template_kwargs)
        return tokenizer.encode(text, False)

    def _encoded(self, prompt: str | list[int], name: str) -> np.ndarray:
        if isinstance(prompt, str):
            prompt = self.target.tokenizer.encode(prompt)
        if len(prompt) > self.bounds.prompt:
            raise TooLong(f"{name} has {len(prompt)} tokens: at most {self.bounds.prompt}")
        return encode_prompt(self.target, prompt, name)

    def _tokens_asked(self, body: Body) -> int | None:
        if not isinstance(body, ChatBody):
            return TEXT_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        newer, older = body.max_completion_tokens, body.max_tokens
        return older if newer is None else newer

    def _budget(self, engine: Engine, length: int, asked: int | None) -> int:
        """New tokens of a prompt; where nothing is said, as many as there may be."""
        models = [engine.target, *([engine.draft] if engine.draft else [])]
        context = min(model.config.max_position for model in models)
        if asked is None:
            asked = max(1, min(self.max_output, context - length))
        if asked > self.max_output:
            raise OptionError(f"max_tokens={asked}: at most {self.max_output}")
        if length + asked > self.target.config.max_position:
            raise TooLong(
                f"{length} tokens and {asked} to come: "
                f"the context holds {self.target.config.max_position}"
            )
        if engine.draft:
            check_draft_context(engine.draft, length, asked)
        return asked

    # --- methods -------------------------------------------------------------------------------

    def _variant(self, body: Body, greedy: bool) -> Variant:
        name = body.method or self.method
        options = dict(self.defaults) if name == self.method else {}
        options |= body.options or {}
        items = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in options.items())
        own = body.wants_logprobs and body.alternatives is None  # scores hold them, too
        return Variant(name, self._engine(name, items, greedy), own)

    @functools.cached_property
    def _engine(self) -> Callable[[str, Hashable, bool], Engine]:
        """The engine of a method, its options and kind of sampling; the last ones are kept."""
        return functools.lru_cache(ENGINES, typed=True)(self._make_engine)

    def _make_engine(self, name: str, options: tuple, greedy: bool) -> Engine:
        spec: MethodSpec = method(name)
        if spec.needs_reward:
            raise OptionError(f"method {name} needs a reward, and this server has none")
        engine = make_engine(self.target, self.draft, spec, dict(options), greedy)
        if engine.method.round_positions > WIDEST:
            raise OptionError(
                f"method {name} with these options is {engine.method.round_positions} tokens wide: "
                f"at most {WIDEST}"
            )
        needed = self._bytes(engine)
        if needed > self.memory:
            raise OptionError(
                f"method {name} with these options needs {needed / 2**30:.1f} GiB for "
                f"{self.size} rows: at most {self.memory / 2**30:.1f}"
            )
        return engine

    def _bytes(self, engine: Engine) -> int:
        """What the rows in flight take at the most; nothing is computed."""
        capacity = bucket(self.bounds.total + engine.method.round_positions)
        tokens = jax.ShapeDtypeStruct((self.size, capacity), jnp.int32)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), self.size))
        empty = loop.empty_state(engine.method, True)
        state = jax.eval_shape(empty, engine.inputs(Sampling(), self.size), tokens, keys)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
