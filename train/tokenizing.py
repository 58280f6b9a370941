"""The work of ``train.tokens``: find the config's program, make its shards, print what was made."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from specjax._util.errors import InputError
from specjax.lm import locate
from specjax.models.hf.read import load_config
from train.config import DataSection, HeadRunConfig, LMConfig, SDSATConfig, from_dict, read_toml
from train.data.shards.building import make_shards, recipe_of
from train.data.shards.reading import inventory_of
from train.data.shards.writing import Recipe
from train.head.prepare import read_target
from train.lm.prepare import chats_of, get_tokenizer, layout
from train.sdsat.prepare import prepare_setup


def run(args: argparse.Namespace) -> int:
    """The program; returns the exit code."""
    if args.processes < 0:
        raise InputError(f"--processes {args.processes}: expected 0 or more")
    data, recipe = read_config(read_toml(args.config, args.set))
    manifest = make_shards(data, recipe, args.processes)
    if args.json:
        print(json.dumps(manifest))
    else:
        print(_report(data.shards, manifest))
    return 0


def read_config(values: dict[str, Any]) -> tuple[DataSection, Recipe]:
    """(data, recipe of its shards) of the program that a config is for, which its sections tell.

    Raises:
      InputError, ModelError: the config asks for no shards, or its values contradict each other.
    """
    if "sdsat" in values:
        kind = SDSATConfig
    elif "head" in values:
        kind = HeadRunConfig
    else:
        kind = LMConfig
    cfg = from_dict(kind, values)
    if not cfg.data.shards:
        raise InputError("data.shards is empty: name a directory for the tokens")
    if isinstance(cfg, SDSATConfig):
        setup = prepare_setup(cfg)
        return cfg.data, recipe_of(cfg.data, setup.tokenizer, setup.layout, setup.chats)
    if isinstance(cfg, HeadRunConfig):
        target = read_target(cfg)
        return cfg.data, recipe_of(cfg.data, target.tokenizer, target.layout, target.chats)

    tokenizer = get_tokenizer(cfg, None, Path())
    start = cfg.model.init_from
    model = load_config(locate(start)) if start else None
    ends = layout(cfg, model, tokenizer)
    return cfg.data, recipe_of(cfg.data, tokenizer, ends, chats_of(cfg))


def _report(directory: str, manifest: dict[str, Any]) -> str:
    """Lines about what was made and what was left out."""
    return "\n".join(
        [f"{directory}: {len(manifest['shards'])} shards", *inventory_of(manifest).lines()]
    )
