"""specjax as a model of lm-evaluation-harness: its registry knows it once this is imported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import lm_eval.models  # noqa: F401, the registry does not fill itself once it has an entry
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from infer.loading import use_compilation_cache
from infer.scoring import check_scorable, score
from specjax import lm
from specjax._util.errors import OptionError
from specjax.core.warp import Sampling
from specjax.registry import method as named
from specjax.runtime.generate import generate, make_engine

BATCH, NEW_TOKENS = 8, 256
# What tasks may ask of a generation; what else they name changes the text, and is refused.
UNTIL, BUDGETS = "until", ("max_gen_toks", "max_new_tokens", "max_tokens")
SAMPLING = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}


@register_model("specjax")
class Specjax(TemplateLM):
    """A target and what decodes it: generation is the method's, scores are the target's own."""

    def __init__(
        self,
        pretrained: str = "demo",
        draft: str | None = None,
        method: str = "autoregressive",
        batch_size: int | str = BATCH,
        max_batch_size: int | None = None,
        max_gen_toks: int = NEW_TOKENS,
        seed: int = 0,
        dtype: str | None = None,
        quantize: str | None = None,
        device: str | None = None,
        **options: Any,
    ):
        """``max_batch_size`` and ``device`` are the harness's own, and have nothing to say here.

        Raises:
          SpecjaxError: a model, method or option cannot be used; before any task is loaded.
        """
        super().__init__()
        use_compilation_cache()
        self._target = lm.load(pretrained, dtype=dtype, quantize=quantize)
        self._draft = _load_draft(self._target, draft, dtype, quantize)
        if self._target.tokenizer is None:
            raise OptionError(f"{pretrained} has no tokenizer")
        check_scorable(self._target)
        self._method, self._options = method, options
        make_engine(self._target, self._draft, named(method), options)
        self._batch = BATCH if str(batch_size).startswith("auto") else int(batch_size)
        self._budget, self._seed = int(max_gen_toks), int(seed)

    # --- text and tokens -----------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        config = self._target.config
        return next(iter(self._target.eos_ids), config.bos_id or 0)

    @property
    def prefix_token_id(self) -> int:
        bos = self._target.config.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self._target.source.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        return self._target.tokenizer.encode(string, add_special_tokens is not False)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        if not add_generation_prompt:
            raise OptionError("an answer that has begun is no chat of the model's template")
        return self._target.tokenizer.apply_chat(chat_history)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """For the harness's fingerprint alone."""
        return self.tokenizer_name if chat_template else None

    # --- generation ----------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the method writes, up to a text of ``until``; requests that ask alike together."""
        alike: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        texts: dict[int, str] = {}
        for asked, members in alike.items():
            contexts = [requests[i].args[0] for i in members]
            found = self._generated(contexts, json.loads(asked), members)
            texts |= dict(zip(members, found, strict=True))
        for i, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, texts[i])
        return [texts[i] for i in range(len(requests))]

    def _generated(
        self, contexts: Sequence[str], asked: dict[str, Any], indices: Sequence[int]
    ) -> list[str]:
        stop, budget, sampling = read_request(asked, self._budget)
        models = [self._target, *([self._draft] if self._draft else [])]
        room = min(model.config.max_position for model in models) - budget
        if room < 1:
            raise OptionError(f"max_gen_toks={budget} leaves no room for a prompt")
        # As everywhere in the harness a context that is too long keeps its end.
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        prompts = [prompt or [self.prefix_token_id] for prompt in prompts]
        return generate(
            self._target,
            prompts,
            method=self._method,
            draft=self._draft,
            options=self._options,
            sampling=sampling,
            max_new_tokens=budget,
            stop=stop,
            seed=self._seed,
            batch_size=self._batch,
            indices=list(indices),
        ).text

    # --- scoring -------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Of each continuation its log-probability in nats, and whether it is the greedy one."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        most = self._target.config.max_position + 1  # the last token is not read
        # Rows of like length share a bucket.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1] + requests[i][2]))
        for first in range(0, len(order), self._batch):
            batch = order[first : first + self._batch]
            rows = [(requests[i][1] + requests[i][2])[-most:] for i in batch]
            filled = rows + [rows[-1][:1]] * (self._batch - len(rows))  # one trace per bucket
            for i, scores in zip(batch, score(self._target, filled), strict=False):
                count = len(requests[i][2])
                own = slice(max(len(scores.log_probs) - count, 0), None)
                total = float(scores.log_probs[own].sum(dtype="float64"))
                found[i] = total, bool(scores.is_best[own].all())
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Of each whole text, in windows of the context's length where it is longer."""
        totals = []
        for (text,) in [request.args for request in requests]:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._target.config.max_position,
                context_len=1,
            )
            asked = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(value for value, _ in self._loglikelihood_tokens(asked)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals


def _load_draft(target: lm.LM, name: str | None, dtype: str | None, quantize: str | None):
    if name is None:
        return None
    if name.startswith(lm.SELF):
        return lm.own_draft(target, name)
    return lm.load(name, dtype=dtype, quantize=quantize)


def read_request(
    asked: dict[str, Any], most: int = NEW_TOKENS
) -> tuple[tuple[str, ...], int, Sampling]:
    """Stop strings, budget and sampling of a task's ``generation_kwargs``.

    Raises:
      OptionError: it asks for what changes the text and is not known.
    """
    left = dict(asked)
    stop = left.pop(UNTIL, None) or ()
    stop = (stop,) if isinstance(stop, str) else tuple(text for text in stop if text)
    budgets = [left.pop(name) for name in BUDGETS if name in left]
    sampled = left.pop("do_sample", None)
    values = {name: left.pop(name, default) for name, default in SAMPLING.items()}
    if sampled is False:
        values = SAMPLING
    elif sampled and "temperature" not in asked:
        values = values | {"temperature": 1.0}
    if left:
        raise OptionError(f"generation_kwargs {min(left)}={left[min(left)]}: not known here")
    return stop, int(budgets[0] if budgets else most), Sampling(**values)


def evaluate(args: None) -> int:
    """lm-eval's own program, which then knows ``specjax``; it reads the arguments itself."""
    cli_evaluate()
    return 0
