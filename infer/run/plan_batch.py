"""``infer.run --plan batch``: the memory of a batch, by the compiled programs of its rounds.

The programs are compiled from shapes for this machine's devices, and the compiler says how much
memory they need. No weights are read, and nothing is decoded.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

import specjax as sj
from infer.abstract_models import abstract_model, lower_prefill, lower_rounds
from infer.run.job import Job, chosen_method, only_prompt
from specjax import lm
from specjax.core import loop
from specjax.core.mesh import make_mesh
from specjax.models.cache import bucket, bucket_below
from specjax.models.families.head_config import HeadConfig
from specjax.models.hf.generation import read_generation_defaults
from specjax.models.hf.layout import DTYPES
from specjax.models.hf.read import stored_form
from specjax.models.loading import load_config
from specjax.models.quantization import NO_SCHEME, Scheme, parse_scheme
from specjax.rewards import RewardScorer
from specjax.runtime.engine import Engine
from specjax.runtime.generate import make_engine

PROMPT_TOKENS = 512  # of each prompt, unless --prompt says more

Plan = dict[str, Any]


def batch_plan(args: argparse.Namespace, models: Plan, draft: str | None) -> Plan:
    """Bytes on each device that ``--batch-size`` rows of the method need at the same time.

    Args:
      models: the plan of the models alone.
      draft: the name of the draft; None: there is none.

    Raises:
      SpecjaxError: an argument is wrong, or the models and the method do not fit.
    """
    job, engine = _bound(args, models, draft)
    sampling = job.arguments["sampling"]
    rows = args.batch_size
    context = engine.target.config.max_position
    new_tokens = min(args.max_new_tokens, context - 1)
    prompt = min(PROMPT_TOKENS, context - new_tokens)
    if args.prompt is not None:
        prompt = len(only_prompt(args, job.encoder).tokens)
    chunk = engine.chunk_size(prompt, rows)
    first = loop.first_capacity(engine.method, prompt, new_tokens, chunk)
    last = max(first, bucket(prompt + new_tokens + engine.method.round_positions))

    filled = lower_prefill(engine, rows, first, chunk, sampling).compile().memory_analysis()
    prefill = filled.output_size_in_bytes + filled.temp_size_in_bytes
    lowered = lower_rounds(engine, rows, last, engine.target.mesh, sampling)
    round_ = lowered.compile().memory_analysis()
    state = round_.alias_size_in_bytes  # it is donated
    growing = 0
    if last > first:
        # The state of the bucket before exists until the new one has its contents.
        growing = state + state * bucket_below(last) // last
    waiting = 0
    if rows > 1:
        waiting = (args.prefixes + 1) * state * bucket(prompt) // last // rows
    needed = max(prefill, round_.output_size_in_bytes + round_.temp_size_in_bytes, growing)
    return {
        "rows": rows,
        "prompt_tokens": prompt,
        "new_tokens": new_tokens,
        "device": jax.devices()[0].device_kind,
        "state_bytes": state,
        "temporary_bytes": needed - state,
        "waiting_bytes": waiting,
        "peak_bytes": models["weight_bytes_per_device"] + needed + waiting,
    }


def _bound(args: argparse.Namespace, models: Plan, draft: str | None) -> tuple[Job, Engine]:
    """The job with models of shapes, and its method bound to them."""
    mesh = make_mesh(**args.mesh) if args.mesh else None
    target = _shapes(args, args.target, args.quantize, models["target"], mesh)
    draft_model = None
    if draft is not None and draft.startswith(lm.SELF):
        scheme = draft.removeprefix(lm.SELF)
        draft_model = _shapes(args, args.target, scheme, models["draft"], mesh)
    elif draft is not None:
        draft_model = _shapes(args, draft, args.quantize, models["draft"], mesh)
    job = Job.create(args, target, draft_model)
    spec, _ = chosen_method(args, draft is not None)
    scorer = None
    if spec.needs_reward and job.reward is not None:
        scorer = RewardScorer.bind(job.reward, target, [{}] * args.batch_size, guides=True)
    greedy = job.arguments["sampling"].temperature == 0
    options = job.arguments["options"]
    return job, make_engine(target, draft_model, spec, options, greedy, scorer)


def _shapes(
    args: argparse.Namespace, name: str, scheme: str | None, model: Plan, mesh: Mesh | None
) -> sj.LM:
    """A model of shapes. Weights with codes of other libraries have those of dequantized ones."""
    directory = lm.base_of(name, ("config.json",), args.base)
    cfg = load_config(directory)
    stored = stored_form(directory)
    form = stored if isinstance(stored, Scheme) else None
    if scheme is not None:
        form = None if scheme == NO_SCHEME else parse_scheme(scheme)
    shapes = abstract_model(
        cfg,
        mesh,
        quantize=form,
        pass_width=args.pass_width,
        cache_dtype=args.cache_dtype,
        dtype=DTYPES[model["dtype"]],
        split=model["why_whole_on_each_device"] is None,
    )
    return dataclasses.replace(
        shapes,
        source=name,
        tokenizer=None if isinstance(cfg, HeadConfig) else lm.read_tokenizer(directory),
        generation_defaults=read_generation_defaults(directory, cfg.vocab_size),
    )
