"""Turns a request's body into a submission, checked against the models and the server's limits.

It knows the models and their options, but neither HTTP nor the device's thread.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infer.loading import split_by_method
from infer.sampling_options import word_ids
from infer.serve.refusals import NoSuchModel, TooLong, naming
from infer.serve.schemas import Body, ChatBody, CompletionBody, Message, SamplingFields, Tool
from infer.serve.tools.families import find_family
from infer.serve.tools.requests import check_tools, grammar_of_calls
from infer.serve.variants import Submission, Variant
from specjax._util.checks import SEED_MAX, format_value
from specjax._util.errors import OptionError
from specjax.core import loop
from specjax.core.sampling import Sampling
from specjax.lm import LM
from specjax.models.cache import bucket, bucket_below
from specjax.registry import MethodSpec, method
from specjax.runtime.engine import Engine
from specjax.runtime.generate import check_draft_context, encode_prompt, make_engine
from specjax.runtime.scheduler import Bounds

MAX_ENGINES = 64  # in the cache; an engine is a method with its options
MAX_ROUND_TOKENS = 128  # tokens that a method passes through the model in one round
DEFAULT_MAX_TOKENS = 16  # OpenAI's default for /v1/completions


@dataclasses.dataclass(frozen=True, eq=False)
class Admission:
    """What the server has loaded, and what a request may ask for.

    Args:
      name: what clients call the model.
      method: decodes requests that name no method, with the options ``defaults``.
      sampling: of requests, where they give no value of their own.
      size: batch slots of each method.
      max_prompt, max_output: tokens of a prompt and of a completion.
      memory: bytes that the batch slots and the kept prompts of one method may need.
      prefixes: prompts that a method's prefix cache keeps, as long as memory allows.
      max_rows: completions of one request.
      methods: what requests may name, with no options that compile anew; None: any method.
      tool_family: how the model writes calls of tools; None: in a form that is not known.
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
    prefixes: int
    max_rows: int
    methods: Sequence[str] | None = None
    tool_family: str | None = None

    @property
    def bounds(self) -> Bounds:
        """The limits that hold for every request."""
        context = self.target.config.max_position
        prompt = min(self.max_prompt, context - 1)
        return Bounds(prompt, min(prompt + self.max_output, context))

    def make_submission(
        self, body: Body, on_output: Callable, client: Hashable = None
    ) -> Submission:
        """The submission that a request asks for. Long texts and templates take a while.

        Args:
          body: the parsed request.
          on_output: gets the pieces of the answer, as :class:`Submission` says.
          client: who asks; clients take turns.

        Raises:
          SpecjaxError: a field is wrong or exceeds a limit; one line names it.
        """
        self.check_model(body.model)
        sampling = self._sampling(body)
        self._check_scoring(body)
        variant = self._variant(body, sampling.temperature == 0)
        with naming(self._grammar(body)[0]):
            variant.engine.check_sampling(sampling)
        prompts = self._prompts(body)

        budgets = self._budgets(body, variant.engine, prompts)
        seed = body.whole_seed
        if seed is None:
            seed = secrets.randbelow(SEED_MAX + 1)
        samples = body.n or 1
        size = len(prompts) * samples
        if size > self.max_rows:
            with naming("n"):
                raise OptionError(f"{size} completions at once: at most {self.max_rows}")
        return Submission(
            variant,
            prompts,
            budgets,
            samples,
            seed,
            sampling,
            body.stops,
            on_output,
            scored=body.alternatives is not None,
            client=client,
            body=body,
        )

    def _sampling(self, body: Body) -> Sampling:
        """A request's sampling: its own values, else the server's."""
        given = {}
        for name in SamplingFields.model_fields:
            value = getattr(body, name)
            if value is None:
                continue
            with naming(name):
                if name == "top_k":
                    value = max(value, 0)  # −1 is off, too
                if name == "bad_words":
                    value = word_ids(value, self.target.tokenizer)
                Sampling(**{name: value}).check_vocabulary(self.target.config.vocab_size)
            given[name] = value
        field, grammar = self._grammar(body)
        with naming(field):
            if grammar:
                given["grammar"] = grammar
            return Sampling(**(self._own_sampling(body, given) | given))

    def _own_sampling(self, body: Body, given: Mapping[str, Any]) -> dict[str, Any]:
        """The server's sampling, without settings that the request's method does not take."""
        all_own = self.sampling.as_given
        greedy = given.get("temperature", all_own["temperature"]) == 0
        own = {name: value for name, value in all_own.items() if name not in given}
        taken, _ = split_by_method(self._variant(body, greedy).engine.method, own, given)
        return taken

    def _grammar(self, body: Body) -> tuple[str, str]:
        """The field that asks for a grammar, and the grammar; both empty if none does."""
        if not isinstance(body, ChatBody):
            return body.grammar
        check_tools(body)
        if not body.offered_tools:
            return body.grammar
        with naming("tools"):
            family = find_family(self.tool_family)
            return "tools", grammar_of_calls(body, family, self.target.tokenizer)

    def check_model(self, name: str | None) -> None:
        """Refuses the name of another model.

        Raises:
          NoSuchModel: it is neither left out nor the served model's.
        """
        if name not in (None, self.name):
            with naming("model"):
                raise NoSuchModel(f"model {name!r}: this server has {self.name!r}")

    def _check_scoring(self, body: Body) -> None:
        """Refuses what does not work with scores, which are computed when a row has ended."""
        echo = isinstance(body, CompletionBody) and body.echo
        if body.max_tokens == 0 and not echo:
            with naming("max_tokens"):
                raise OptionError("max_tokens=0 generates nothing: it needs echo")
        if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
            with naming("top_logprobs"):
                raise OptionError("top_logprobs needs logprobs")

    # --- prompts and budgets -------------------------------------------------------------------

    def _prompts(self, body: Body) -> list[np.ndarray]:
        if isinstance(body, ChatBody):
            with naming("messages"):
                text = self.chat_text(body.messages, body.offered_tools, body.chat_template_kwargs)
                return [self._encode(self.text_ids(text, "messages", False), "messages")]
        assert isinstance(body, CompletionBody)  # the only other kind
        if body.best_of not in (None, body.n or 1):
            with naming("best_of"):
                raise OptionError(
                    f"best_of={body.best_of}: expected n, completions are not ranked; leave it out"
                )
        with naming("prompt"):
            return [self._encode(prompt, "prompt") for prompt in body.prompts]

    def chat_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        options: Mapping[str, Any] | None,
    ) -> str:
        """The prompt of a conversation, through the model's chat template."""
        tokenizer = self.target.tokenizer
        if not tokenizer.chats:
            raise OptionError("this model has no chat template: use /v1/completions")
        variables = dict(options or {})
        if tools:
            variables["tools"] = [tool.plain() for tool in tools]
        return tokenizer.apply_chat([message.plain() for message in messages], variables)

    def text_ids(self, text: str, field: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text.

        Raises:
          TooLong: so many bytes are surely more than ``bounds.prompt`` tokens. They are not
            tokenized, which takes a second per megabyte.
        """
        size = len(text.encode(errors="surrogatepass"))
        most = self.bounds.prompt * self._max_token_bytes
        if size > most:
            raise TooLong(
                f"{field} has {size} bytes: at most {self.bounds.prompt} tokens, "
                f"which hold no more than {most}"
            )
        return self.target.tokenizer.encode(text, add_special_tokens)

    @functools.cached_property
    def _max_token_bytes(self) -> int:
        """The most bytes of text that one token can stand for."""
        return self.target.tokenizer.max_token_bytes

    def _encode(self, prompt: str | list[int], field: str) -> np.ndarray:
        if isinstance(prompt, str):
            prompt = self.text_ids(prompt, field)
        if len(prompt) > self.bounds.prompt:
            raise TooLong(f"{field} has {len(prompt)} tokens: at most {self.bounds.prompt}")
        return encode_prompt(self.target, prompt, field)

    def _budgets(self, body: Body, engine: Engine, prompts: list[np.ndarray]) -> list[int]:
        """How many new tokens each prompt gets."""
        max_tokens = _max_tokens(body)
        most = DEFAULT_MAX_TOKENS if isinstance(body, CompletionBody) else self.max_output
        allowed = min(most, self.max_output) if max_tokens is None else max_tokens
        if body.min_tokens and body.min_tokens > allowed:
            with naming("min_tokens"):
                raise OptionError(f"min_tokens={body.min_tokens}: at most max_tokens={allowed}")
        return [self._budget(engine, len(prompt), max_tokens, most) for prompt in prompts]

    def _budget(self, engine: Engine, length: int, max_tokens: int | None, most: int) -> int:
        """How many new tokens a prompt of ``length`` tokens gets.

        If ``max_tokens`` is None, it is as many as limits allow, and at most ``most``.
        """
        context = self.target.config.max_position
        shortest = context
        if engine.draft:
            shortest = min(context, engine.draft.config.max_position)
        if max_tokens is None:
            max_tokens = max(1, min(most, self.max_output, shortest - length))

        with naming("max_tokens"):
            if max_tokens > self.max_output:
                raise OptionError(
                    f"max_tokens={format_value(max_tokens)}: at most {self.max_output}"
                )
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
        with naming("options" if body.options else "method"):
            engine, kept = self._engine(name, options, greedy)
            self._check_allowed(name, engine, greedy)
        # Scores include the tokens' log-probabilities, so decoding need not compute them.
        logprobs = body.wants_logprobs and body.alternatives is None
        return Variant(name, engine, logprobs, kept)

    def _check_allowed(self, name: str, engine: Engine, greedy: bool) -> None:
        """Refuses a method that ``methods`` leaves out, and options that compile programs anew."""
        if self.methods is None:
            return
        if name not in self.methods and name != self.method:
            allowed = ", ".join(sorted({self.method, *self.methods}))
            raise OptionError(f"method {name}: this server allows {allowed}")
        defaults = self.defaults if name == self.method else {}
        if engine.method != self._engine(name, defaults, greedy)[0].method:
            raise OptionError(
                f"options of method {name}: this server allows only those that compile nothing new"
            )

    def _engine(self, name: str, options: Mapping[str, Any], greedy: bool) -> tuple[Engine, int]:
        """The method with its options, and how many prompts its prefix cache keeps."""
        items = tuple(options.items())
        # 1, 1.0 and True are equal, but not the same option value. Their texts differ.
        return self._engines(name, items, repr(items), greedy)

    @functools.cached_property
    def _engines(self) -> Callable[[str, Hashable, str, bool], tuple[Engine, int]]:
        """:meth:`_make_engine`, with a cache of the last results."""
        return functools.lru_cache(MAX_ENGINES)(self._make_engine)

    def _make_engine(self, name: str, options: tuple, _: str, greedy: bool) -> tuple[Engine, int]:
        """What :meth:`_engine` returns; the text of the options is there for the cache."""
        spec: MethodSpec = method(name)
        if spec.needs_reward:
            raise OptionError(f"method {name} needs a reward, and this server has none")
        engine = make_engine(self.target, self.draft, spec, dict(options), greedy)
        if engine.method.round_positions > MAX_ROUND_TOKENS:
            raise OptionError(
                f"method {name} with these options needs {engine.method.round_positions} tokens "
                f"per round: at most {MAX_ROUND_TOKENS}"
            )
        needed = self._needed(engine)
        if needed > self.memory:
            raise OptionError(
                f"method {name} with these options needs {needed / 2**30:.1f} GiB for "
                f"{self.size} rows: at most {self.memory / 2**30:.1f}"
            )
        return engine, self._kept_prompts(engine)

    def _needed(self, engine: Engine) -> int:
        """The most bytes of a method without kept prompts: its slots, and a prompt's prefill."""
        return self._bytes(engine, self.size) + self._bytes(engine, engine.data_parallel_size)

    def _kept_prompts(self, engine: Engine) -> int:
        """How many states the prefix cache of a method keeps.

        A state has a prompt for each device along ``data``, and each may take as much as a row.
        """
        free = self.memory - self._needed(engine)
        return min(self.prefixes, free // self._bytes(engine, engine.data_parallel_size))

    @property
    def kv_cache_max_bytes(self) -> int:
        """The most bytes of the default method's slots, a prefill and its prefix cache.

        While slots grow to the next length, those before are still there. Compiled programs and
        what a pass computes are not counted, nor a second state that compiles programs.
        """
        engine, kept = self._engine(self.method, self.defaults, True)
        capacity = bucket_below(self._capacity(engine))
        before_growth = self._bytes(engine, self.size, capacity)
        prompts = kept * self._bytes(engine, engine.data_parallel_size)
        return self._needed(engine) + before_growth + prompts

    def _capacity(self, engine: Engine) -> int:
        """The most cache positions that a row of a method can need."""
        return bucket(self.bounds.total + engine.method.round_positions)

    def _bytes(self, engine: Engine, rows: int, capacity: int | None = None) -> int:
        """The bytes of so many rows of a method, from shapes alone; by default the most."""
        capacity = capacity or self._capacity(engine)
        tokens = jax.ShapeDtypeStruct((rows, capacity), jnp.int32)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
        empty = loop.empty_state(engine.method, True)
        state = jax.eval_shape(empty, engine.inputs(Sampling(), rows), tokens, keys)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def _max_tokens(body: Body) -> int | None:
    """The number of new tokens that a request asks for; None: it does not say."""
    if isinstance(body, ChatBody):
        if body.max_completion_tokens is not None:
            return body.max_completion_tokens
        return body.max_tokens  # OpenAI's former name for it
    if body.max_tokens is None:
        return None
    # An echo alone asks for 0, but every row decodes at least one token.
    return max(1, body.max_tokens)
