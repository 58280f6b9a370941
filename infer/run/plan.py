"""``infer.run --plan``: the memory that models need, from their configs alone.

Sizes are in bytes. No weights are read, so a plan takes no time and little memory. ``--plan batch``
also compiles what a batch runs: :mod:`infer.run.plan_batch`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from typing import Any

from infer.cli import SELF, mesh_text
from infer.loading import bases_of, device_memory, draft_name
from infer.run.job import check_method
from infer.run.plan_batch import batch_plan
from specjax import lm
from specjax._util.errors import SplitError
from specjax._util.platform import platform
from specjax._util.program import require_output
from specjax.models import ModelConfig, num_params
from specjax.models.cache import ring_capacity, row_bytes
from specjax.models.cpu_kernels import narrow_product
from specjax.models.forward_pass import active_params
from specjax.models.gguf.header import is_gguf
from specjax.models.gguf.read import kept_bytes
from specjax.models.hf.layout import DTYPES
from specjax.models.hf.read import stored_form
from specjax.models.loading import load_config
from specjax.models.placement import check_split
from specjax.models.quantization import (
    NO_SCHEME,
    StoredForm,
    active_bytes,
    param_bytes,
    parse_scheme,
)
from specjax.models.sharding import split_config

BATCH = "batch"  # the plan that compiles
HEADROOM = 0.1  # share of the memory for activations, logits and the program itself
# Tokens per row for which the largest batch is listed, besides the longest possible row.
PASS_TOKENS = (1, 4, 8, 64)  # of all rows together, in passes of a mixture of experts
ROW_LENGTHS = (1024, 4096, 16384)

Plan = dict[str, Any]


def print_plan(args: argparse.Namespace) -> int:
    """Prints the plan of ``--target`` and ``--draft``; returns the exit code."""
    require_output()
    names = {"target": args.target}
    schemes = {"target": args.quantize, "draft": args.quantize}
    compiles = args.plan == BATCH
    draft = draft_name(args, want_draft=compiles and check_method(args))
    if draft and draft.startswith(SELF):
        names["draft"] = args.target
        schemes["draft"] = draft.removeprefix(SELF)
    elif draft:
        names["draft"] = draft

    memory = int(args.memory * 2**30) if args.memory else device_memory()
    bases_of(args, draft)  # refuses --base without a delta
    plan = make_plan(
        names,
        args.dtype,
        memory,
        args.mesh,
        schemes,
        args.cache_dtype,
        args.base,
        args.draft_whole,
    )
    if compiles:
        plan |= {"batch": batch_plan(args, plan, draft)}
    text = json.dumps(plan) if args.json else describe(plan)
    print(text)
    return 0


def make_plan(
    names: dict[str, str],
    dtype: str | None,
    memory: int,
    mesh: dict[str, int] | None = None,
    schemes: Mapping[str, str | None] | None = None,
    cache_dtype: str | None = None,
    base: str | None = None,
    draft_whole: bool = False,
) -> Plan:
    """The sizes of models in bytes, and the largest batches that fit, in rows.

    Args:
      names: models by role, ``target`` and maybe ``draft``.
      dtype: of weights and activations; None: the default of the device.
      memory: bytes of each device.
      mesh: devices along the axes ``data`` and ``model``; None: one device.
      schemes: by role, how the weights will be quantized.
      cache_dtype: of keys and values; None: as ``dtype``.
      base: of models that are deltas, as :func:`specjax.load` takes it.
      draft_whole: the draft is whole on each device, even if they can share it.

    Raises:
      ModelError: a model or its config cannot be used, or the target cannot be split.
    """
    mesh = mesh or {"data": 1, "model": 1}
    schemes = schemes or {}
    models = {}
    for role, name in names.items():
        scheme = schemes.get(role)
        may_be_whole = role == "draft"
        devices = 1 if may_be_whole and draft_whole else mesh["model"]
        models[role] = model_plan(name, dtype, devices, may_be_whole, scheme, cache_dtype, base)

    weights = sum(model["weight_bytes_per_device"] for model in models.values())
    free = int(memory * (1 - HEADROOM)) - weights
    longest = min(model["max_position"] for model in models.values())
    lengths = sorted({min(tokens, longest) for tokens in (*ROW_LENGTHS, longest)})
    batches = {}
    for tokens in lengths:
        needed = sum(_row_bytes(model, tokens) for model in models.values())
        # Each group of devices along the data axis has rows of its own.
        batches[tokens] = max(0, free // needed) * mesh["data"]
    return models | {
        "mesh": mesh,
        "memory_bytes": memory,
        "weight_bytes": sum(model["weight_bytes"] for model in models.values()),
        "weight_bytes_per_device": weights,
        "largest_batch_by_tokens_per_row": batches,
    }


def _row_bytes(model: Plan, tokens: int) -> int:
    """Bytes of KV cache on one device for a row of ``tokens``."""
    cached = tokens
    sliding = model["sliding_layers"]
    if sliding:
        # Beyond the window, sliding layers need no more memory.
        beyond = max(0, tokens - sliding["tokens"])
        cached = tokens - beyond * sliding["share_of_cache"]
    return round(model["cache_bytes_per_device_token_and_row"] * cached)


def model_plan(
    name: str,
    dtype: str | None,
    devices: int = 1,
    may_be_whole: bool = False,
    quantize: str | None = None,
    cache_dtype: str | None = None,
    base: str | None = None,
) -> Plan:
    """One model's parameters, bytes of weights, and bytes of KV cache per token and row.

    The model is split over ``devices``. If they cannot share it, it is whole on each of them, or
    refused where it may not be.
    """
    dtype = lm.resolve_dtype(dtype)
    directory = lm.base_of(name, ("config.json",), base)
    cfg = load_config(directory)
    scheme = stored_form(directory) if quantize is None else None
    if quantize not in (None, NO_SCHEME):
        scheme = parse_scheme(quantize)
    cached = cache_dtype or DTYPES[dtype]
    if scheme is not None:
        param_bytes(cfg, DTYPES[dtype], scheme)  # raises if the groups do not divide its weights
    share, why_whole = _share(cfg, devices, scheme, may_be_whole)
    if is_gguf(directory) and quantize is None:
        whole = kept_bytes(directory, DTYPES[dtype])
        per_device = -(-whole // share.shards)
    else:
        whole = param_bytes(cfg, DTYPES[dtype], scheme)
        per_device = param_bytes(share, DTYPES[dtype], scheme)
    has_codes = whole < param_bytes(cfg, DTYPES[dtype])
    return {
        "model": name,
        "family": cfg.family,
        "dtype": dtype,
        "parameters": num_params(cfg),
        "active_parameters": active_params(cfg),
        "experts": _experts_plan(cfg, DTYPES[dtype], scheme),
        "quantize": None if scheme is None else str(scheme),
        "weight_bytes": whole,
        "weight_bytes_per_device": per_device,
        "why_whole_on_each_device": why_whole,
        "codes_on_cpu": codes_on_cpu() if has_codes else None,
        "cache_bytes_per_token_and_row": row_bytes(cfg, 1, cached),
        "cache_bytes_per_device_token_and_row": row_bytes(share, 1, cached),
        "sliding_layers": sliding_layers(cfg),
        "max_position": cfg.max_position,
        "rope_type": cfg.rope.kind if cfg.rope else None,
    }


def _experts_plan(cfg: ModelConfig, dtype: Any, scheme: StoredForm | None) -> Plan | None:
    """How many experts a token chooses, and the bytes of weights that passes read, by tokens.

    Those are of all devices together, and as distinct as chance makes the experts.
    """
    if cfg.experts is None:
        return None
    read = {tokens: active_bytes(cfg, tokens, dtype, scheme) for tokens in PASS_TOKENS}
    return {
        "count": cfg.experts.count,
        "per_token": cfg.experts.active,
        "read_bytes_by_tokens": read,
    }


def _share(
    cfg: ModelConfig, devices: int, scheme: StoredForm | None, may_be_whole: bool
) -> tuple[ModelConfig, str | None]:
    """One device's share of a model; the whole model where it may be, and why it cannot be split.

    Raises:
      SplitError: it cannot be split and may not be whole.
    """
    try:
        check_split(cfg, devices, scheme)
        return split_config(cfg, devices), None
    except SplitError as error:
        if not may_be_whole:
            raise
        return cfg, str(error)


def codes_on_cpu() -> str | None:
    """What a CPU does with the codes of quantized weights; None on other devices."""
    wants = platform()
    if not wants.dense_groups:
        return None
    problem = narrow_product.problem()
    if problem is None:
        return f"read as they are by passes of up to {wants.kernel_rows} tokens"
    return f"dequantized for every pass, which is slower than --quantize none ({problem})"


def sliding_layers(cfg: ModelConfig) -> Plan | None:
    """The tokens that sliding-window layers keep, and these layers' share of the KV cache."""
    layers = sum(map(bool, cfg.windows))
    if not layers:
        return None
    return {"tokens": ring_capacity(cfg.sliding_window), "share_of_cache": layers / cfg.num_layers}


def describe(plan: Plan) -> str:
    """The plan as lines of text."""
    several_devices = math.prod(plan["mesh"].values()) > 1
    lines = []
    for role in ("target", "draft"):
        if role in plan:
            lines += _describe_model(role, plan[role], several_devices)

    memory = f"{_size(plan['memory_bytes'])} of device memory, {HEADROOM:.0%} kept free"
    if several_devices:
        memory += f", on each of the devices of {mesh_text(plan['mesh'])}"
    batches = plan["largest_batch_by_tokens_per_row"]
    if not any(batches.values()):
        return "\n".join([*lines, f"does not fit into {memory}"])
    lines.append(f"largest batch in {memory}:")
    lines += [f"  {rows:,} rows of {tokens:,} tokens" for tokens, rows in batches.items()]
    if "batch" in plan:
        lines += _describe_batch(plan["batch"])
    return "\n".join(lines)


def _describe_batch(batch: Plan) -> list[str]:
    tokens = f"{batch['prompt_tokens']:,} + {batch['new_tokens']:,} tokens"
    rows = f"{batch['rows']:,} rows of {tokens}, compiled for {batch['device']}:"
    lines = [
        f"  state: {_size(batch['state_bytes'])}, temporaries: {_size(batch['temporary_bytes'])}"
    ]
    if batch["waiting_bytes"]:
        lines.append(f"  prompts that wait or are kept: {_size(batch['waiting_bytes'])}")
    return [rows, *lines, f"  peak with the weights: {_size(batch['peak_bytes'])}"]


def _describe_model(role: str, model: Plan, several_devices: bool) -> list[str]:
    weights = f"{model['parameters']:,} parameters, {_size(model['weight_bytes'])}"
    if model["active_parameters"] < model["parameters"]:
        weights += f", {model['active_parameters']:,} of them for a token"
    cache = f"{_size(model['cache_bytes_per_token_and_row'])} per token and row"
    if several_devices:
        weights += f", {_size(model['weight_bytes_per_device'])} on each device"
        share = _size(model["cache_bytes_per_device_token_and_row"])
        cache = f"{share} per token and row on each device that has the row"
    sliding = model["sliding_layers"]
    if sliding:
        share = f"{sliding['share_of_cache']:.0%} of it"
        cache += f", {share} for the last {sliding['tokens']:,} tokens alone"

    context = f"{model['max_position']:,} tokens"
    if model["rope_type"] == "dynamic":
        context += "; rope_type dynamic stretches nothing here, yarn and linear do"
    kinds = ", ".join(filter(None, (model["family"], model["dtype"], model["quantize"])))
    lines = [f"{role}: {model['model']} ({kinds})", f"  {weights}"]
    if model["experts"]:
        lines.append(_describe_experts(model["experts"]))
    if model["why_whole_on_each_device"]:
        lines.append(f"  whole on each device: {model['why_whole_on_each_device']}")
    if model["codes_on_cpu"]:
        lines.append(f"  codes: {model['codes_on_cpu']}")
    return [*lines, f"  cache: {cache}", f"  context: {context}"]


def _describe_experts(experts: Plan) -> str:
    read = experts["read_bytes_by_tokens"]
    tokens = ", ".join(map(str, read))
    sizes = ", ".join(map(_size, read.values()))
    chosen = f"{experts['per_token']} of {experts['count']} for a token"
    return f"  experts: {chosen}; passes over {tokens} tokens read about {sizes}"


def _size(count: float) -> str:
    """A number of bytes in the largest unit that leaves it above 1."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
