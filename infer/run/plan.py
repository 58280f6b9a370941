"""What models will need, read from their configs before any weight is: ``infer.run --plan``."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from typing import Any

from infer.cli import SELF, mesh_text
from infer.loading import device_memory, draft_name
from specjax import lm
from specjax._util.errors import ModelError
from specjax.models import ModelConfig, num_params
from specjax.models.cache import ring_capacity, row_bytes
from specjax.models.hf.layout import DTYPES
from specjax.models.hf.read import load_config, stored_scheme
from specjax.models.quantization import param_bytes, parse_scheme
from specjax.models.sharding import split_config

HEADROOM = 0.1  # of the memory, for activations, logits and the program itself
CONTEXTS = (1024, 4096, 16384)  # tokens per row to give a batch for, beside the longest

Plan = dict[str, Any]


def print_plan(args: argparse.Namespace) -> int:
    """Prints the plan of ``--target`` and ``--draft``."""
    names = {"target": args.target}
    schemes = dict.fromkeys(("target", "draft"), args.quantize)
    if draft := draft_name(args, want_draft=False):
        names["draft"] = draft
        if draft.startswith(SELF):
            names["draft"], schemes["draft"] = args.target, draft.removeprefix(SELF)
    memory = int(args.memory * 2**30) if args.memory else device_memory()
    plan = make_plan(names, args.dtype, memory, args.mesh, schemes, args.cache_dtype)
    print(json.dumps(plan) if args.json else describe(plan))
    return 0


def make_plan(
    names: dict[str, str],
    dtype: str | None,
    memory: int,
    mesh: dict[str, int] | None = None,
    schemes: Mapping[str, str | None] | None = None,
    cache_dtype: str | None = None,
) -> Plan:
    """The models' sizes and the largest batches; ``memory`` in bytes, of each device.

    ``schemes``: by role, how the weights are to be quantized. ``cache_dtype``: of keys and values.

    Raises:
      ModelError: a model directory or its config cannot be used, or the target not be split.
    """
    mesh, schemes = mesh or {"data": 1, "model": 1}, schemes or {}
    models = {
        role: model_plan(name, dtype, mesh["model"], role, schemes.get(role), cache_dtype)
        for role, name in names.items()
    }
    weights = sum(model["weight_bytes_per_device"] for model in models.values())
    longest = min(model["max_position"] for model in models.values())
    free = int(memory * (1 - HEADROOM)) - weights
    rows = {
        tokens: max(0, free // sum(_cache(model, tokens) for model in models.values()))
        * mesh["data"]
        for tokens in sorted({min(tokens, longest) for tokens in (*CONTEXTS, longest)})
    }
    return models | {
        "mesh": mesh,
        "memory_bytes": memory,
        "weight_bytes": sum(model["weight_bytes"] for model in models.values()),
        "weight_bytes_per_device": weights,
        "largest_batch_by_tokens_per_row": rows,
    }


def _cache(model: Plan, tokens: int) -> int:
    """Bytes of a device for a row of so many tokens."""
    sliding = model["sliding_layers"] or {"tokens": tokens, "share_of_cache": 0}
    beyond = max(0, tokens - sliding["tokens"]) * sliding["share_of_cache"]
    return round(model["cache_bytes_per_device_token_and_row"] * (tokens - beyond))


def model_plan(
    name: str,
    dtype: str | None,
    devices: int = 1,
    role: str = "target",
    quantize: str | None = None,
    cache_dtype: str | None = None,
) -> Plan:
    """One model: parameters, bytes of its weights, bytes of cache per token and row.

    ``devices`` share it; a draft that cannot be split is whole on each.
    """
    dtype = lm.resolve_dtype(dtype)
    directory = lm.base_of(name, files=("config.json",))
    cfg = load_config(directory)
    scheme = parse_scheme(quantize) if quantize else stored_scheme(directory)
    cached = cache_dtype or DTYPES[dtype]
    try:
        share = split_config(cfg, devices)
    except ModelError:
        if role == "target":
            raise
        share = cfg

    return {
        "model": name,
        "family": cfg.family,
        "dtype": dtype,
        "parameters": num_params(cfg),
        "quantize": None if scheme is None else str(scheme),
        "weight_bytes": param_bytes(cfg, DTYPES[dtype], scheme),
        "weight_bytes_per_device": param_bytes(share, DTYPES[dtype], scheme),
        "cache_bytes_per_token_and_row": row_bytes(cfg, 1, cached),
        "cache_bytes_per_device_token_and_row": row_bytes(share, 1, cached),
        "sliding_layers": sliding_layers(cfg),
        "max_position": cfg.max_position,
    }


def sliding_layers(cfg: ModelConfig) -> Plan | None:
    """The tokens that layers of a sliding window hold, and their share of the others' cache."""
    layers = sum(map(bool, cfg.windows))
    if not layers:
        return None
    return {"tokens": ring_capacity(cfg.sliding_window), "share_of_cache": layers / cfg.num_layers}


def describe(plan: Plan) -> str:
    """The plan as lines of text."""
    lines, several = [], math.prod(plan["mesh"].values()) > 1
    for role in ("target", "draft") if "draft" in plan else ("target",):
        model = plan[role]
        weights = f"{model['parameters']:,} parameters, {_bytes(model['weight_bytes'])}"
        cache = f"{_bytes(model['cache_bytes_per_token_and_row'])} per token and row"
        if several:
            weights += f", {_bytes(model['weight_bytes_per_device'])} on each device"
            share = _bytes(model["cache_bytes_per_device_token_and_row"])
            cache = f"{share} per token and row on each device that has the row"
        if sliding := model["sliding_layers"]:
            share = f"{sliding['share_of_cache']:.0%} of it"
            cache += f", {share} for the last {sliding['tokens']:,} tokens alone"
        kept = ", ".join(filter(None, (model["family"], model["dtype"], model["quantize"])))
        lines += [
            f"{role}: {model['model']} ({kept})",
            f"  {weights}",
            f"  cache: {cache}",
            f"  context: {model['max_position']:,} tokens",
        ]
    memory = f"{_bytes(plan['memory_bytes'])} of device memory, {HEADROOM:.0%} kept free"
    if several:
        memory += f", on each of the devices of {mesh_text(plan['mesh'])}"
    batches = plan["largest_batch_by_tokens_per_row"]
    if not any(batches.values()):
        return "\n".join([*lines, f"does not fit into {memory}"])
    lines.append(f"largest batch in {memory}:")
    lines += [f"  {rows:,} rows of {tokens:,} tokens" for tokens, rows in batches.items()]
    return "\n".join(lines)


def _bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
