"""specjax as a model of lm-evaluation-harness; importing this file registers it.

Generation uses the method. Scores (``loglikelihood``) are the target's own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import lm_eval.models  # noqa: F401, the registry loads its own models only while it is empty
from lm_eval._cli import HarnessCLI
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, setup_logging

from infer.cli import MAX_ROWS
from infer.loading import use_compilation_cache
from infer.scoring import score
from specjax import lm
from specjax._util.arguments import COUNT
from specjax._util.checks import SEED_MAX, Check
from specjax._util.errors import InputError, OptionError
from specjax._util.sampling_checks import CHECKS
from specjax.core.mesh import make_mesh
from specjax.core.sampling import Sampling
from specjax.registry import method as method_named
from specjax.runtime.generate import generate, make_engine

BATCH_SIZE = 8
NEW_TOKENS = 256
ROWS = Check(int, low=1, high=MAX_ROWS)
SEED = Check(int, low=0, high=SEED_MAX)
# Known keys of ``generation_kwargs``. Others would change the text, and are refused.
UNTIL = "until"
MAX_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens")
SAMPLING = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}


@register_model("specjax")
class Specjax(TemplateLM):
    """A target, and a method that decodes it."""

    def __init__(
        self,
        pretrained: str = "demo",
        draft: str | None = None,
        method: str = "autoregressive",
        batch_size: int | str = BATCH_SIZE,
        max_batch_size: int | None = None,
        max_gen_toks: int = NEW_TOKENS,
        seed: int = 0,
        dtype: str | None = None,
        quantize: str | None = None,
        base: str | None = None,
        device: str | None = None,
        tensor_parallel_size: int | str = 1,
        data_parallel_size: int | str = 1,
        **options: Any,
    ):
        """Loads the models and checks the method and its ``options``.

        ``base`` is that of a target that is a delta. The parallel sizes, named as in lm-eval's
        ``vllm``, are the axes ``model`` and ``data`` of a mesh.

        The harness passes ``max_batch_size`` and ``device``, too; they have no effect.

        Raises:
          SpecjaxError: a model, method or option cannot be used. Tasks load after this check.
        """
        super().__init__()
        use_compilation_cache()
        sizes = {
            "model": COUNT.parse("--model_args tensor_parallel_size", tensor_parallel_size),
            "data": COUNT.parse("--model_args data_parallel_size", data_parallel_size),
        }
        mesh = make_mesh(**sizes) if max(sizes.values()) > 1 else None
        self._target = lm.load(pretrained, dtype=dtype, quantize=quantize, base=base, mesh=mesh)
        self._draft = _load_draft(self._target, draft, dtype, quantize)
        if self._target.tokenizer is None:
            raise OptionError(f"{pretrained} has no tokenizer")
        self._method = method
        self._options = options
        make_engine(self._target, self._draft, method_named(method), options)
        if str(batch_size).startswith("auto"):
            batch_size = BATCH_SIZE
        self._batch_size = ROWS.parse("--model_args batch_size", batch_size)
        self._max_tokens = COUNT.parse("--model_args max_gen_toks", max_gen_toks)
        self._seed = SEED.parse("--model_args seed", seed)
        self._templated = False  # whether the harness's contexts come from the chat template

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
        """Token ids. Without an explicit choice, a template's text gets no special tokens.

        The template has written them already: with ``--apply_chat_template`` a BOS of the tokenizer
        would be a second one.
        """
        if add_special_tokens is None:
            add_special_tokens = not self._templated
        return self._target.tokenizer.encode(string, add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        self._templated = True
        if not add_generation_prompt:
            raise OptionError("chat templates cannot continue an answer that has begun")
        return self._target.tokenizer.apply_chat(chat_history)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """A name for the harness's record of the run; it does not format anything.

        The harness calls this at the start of a run with ``--apply_chat_template``, also where it
        reads the rendered contexts from its cache.
        """
        self._templated = bool(chat_template)
        return self.tokenizer_name if chat_template else None

    # --- generation ----------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The completions, up to a text of ``until``.

        Requests with equal ``generation_kwargs`` are decoded as one job.
        """
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            group = json.dumps(request.args[1], sort_keys=True)
            groups.setdefault(group, []).append(i)

        texts = [""] * len(requests)
        for group, members in groups.items():
            contexts = [requests[i].args[0] for i in members]
            completions = self._complete(contexts, json.loads(group), members)
            for i, text in zip(members, completions, strict=True):
                texts[i] = text
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _complete(
        self, contexts: Sequence[str], kwargs: dict[str, Any], indices: Sequence[int]
    ) -> list[str]:
        stop, max_tokens, sampling = read_request(kwargs, self._max_tokens)
        context = self._target.config.max_position
        if self._draft:
            context = min(context, self._draft.config.max_position)
        room = context - max_tokens
        if room < 1:
            raise OptionError(f"max_gen_toks={max_tokens} leaves no room for a prompt")

        prompts = []
        for text in contexts:
            # A context that is too long keeps its end, as everywhere in the harness.
            tokens = self.tok_encode(text)[-room:]
            prompts.append(tokens or [self.prefix_token_id])
        return generate(
            self._target,
            prompts,
            method=self._method,
            draft=self._draft,
            options=self._options,
            sampling=sampling,
            max_new_tokens=max_tokens,
            stop=stop,
            seed=self._seed,
            batch_size=self._batch_size,
            indices=list(indices),
        ).text

    # --- scoring -------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-probabilities of continuations, in nats, and whether each is the greedy one.

        A request is (texts, ids of the context, ids of the continuation).
        """
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        longest = self._target.config.max_position + 1  # the last token is not read
        tokens = [(context + continuation)[-longest:] for _, context, continuation in requests]
        # Rows of similar length share a capacity bucket. The first row of a batch is its longest.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1] + requests[i][2]))
        for first in range(0, len(order), self._batch_size):
            batch = order[first : first + self._batch_size]
            rows = [tokens[i] for i in batch]
            # Full batches only, so that a bucket is traced once.
            padding = [rows[-1][:1]] * (self._batch_size - len(rows))
            for i, scores in zip(batch, score(self._target, rows + padding), strict=False):
                texts, _, continuation = requests[i]
                # A continuation that is longer than the window keeps only its end.
                start = max(len(scores.log_probs) - len(continuation), 0)
                log_prob = float(scores.log_probs[start:].sum(dtype="float64"))
                results[i] = (log_prob, bool(scores.is_best[start:].all()))
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, results[i])
        return results

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probabilities of whole texts, in windows of the context's length."""
        totals = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._target.config.max_position,
                context_len=1,
            )
            rows = [(None, *make_disjoint_window(window)) for window in windows]
            total = sum(log_prob for log_prob, _ in self._loglikelihood_tokens(rows))
            totals.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals


def _load_draft(
    target: lm.LM, name: str | None, dtype: str | None, quantize: str | None
) -> lm.LM | None:
    if name is None:
        return None
    return lm.load_draft(name, target, dtype=dtype, quantize=quantize, mesh=target.mesh)


def read_request(
    kwargs: dict[str, Any], max_tokens: int = NEW_TOKENS
) -> tuple[tuple[str, ...], int, Sampling]:
    """Stop strings, budget and sampling of a task's ``generation_kwargs``.

    ``max_tokens`` is the budget if the task sets none.

    Raises:
      OptionError: it has an unknown key, which would change the text.
    """
    unread = dict(kwargs)
    stop = unread.pop(UNTIL, None) or ()
    if isinstance(stop, str):
        stop = (stop,)
    stop = tuple(text for text in stop if text)
    budgets = [unread.pop(key) for key in MAX_TOKENS_KEYS if key in unread]
    do_sample = unread.pop("do_sample", None)
    sampling = {name: unread.pop(name, default) for name, default in SAMPLING.items()}
    sampling |= {name: unread.pop(name) for name in CHECKS if name in unread}
    if do_sample is False:
        sampling |= SAMPLING
    elif do_sample and "temperature" not in kwargs:
        sampling["temperature"] = 1.0
    if unread:
        key = min(unread)
        raise OptionError(f"generation_kwargs {key}={unread[key]}: not known here")
    if budgets:
        max_tokens = int(budgets[0])
    return stop, max_tokens, Sampling(**sampling)


def evaluate(args: None) -> int:
    """Runs lm-eval's own program, which reads the command line itself.

    Raises:
      InputError: lm-eval refuses an argument, a task or a file of the command line. Errors that
        come later keep their traceback: they are faults of a task's or of our code.
    """
    setup_logging()
    cli = HarnessCLI()
    parsed = cli.parse_args()
    if parsed.command == "run":
        try:
            config = EvaluatorConfig.from_cli(parsed)
            config.process_tasks(config.metadata)
        except (ValueError, TypeError, LookupError, OSError) as error:
            raise InputError(f"lm-eval: {error}") from None
    cli.execute(parsed)
    return 0
