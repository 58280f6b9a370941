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
from train.config.aliases import renamed
from train.data.shards.building import make_shards, recipe_of
from train.data.shards.reading import inventory_of
from train.data.shards.writing import Recipe
from train.head.prepare import read_target
from train.lm.prepare import chats_of, get_tokenizer, layout
from train.sdsat.prepare import prepare_setup

# The program's config, by a section that no other program has.
SECTIONS = {
    "sdsat": SDSATConfig,
    "head": HeadRunConfig,
    "distill": LMConfig,
    "tokenizer": LMConfig,
}


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
    """(data, recipe of its shards) of the program that a config is for.

    Raises:
      InputError, ModelError: the config asks for no shards, does not tell its program, or its
        values contradict each other.
    """
    cfg = from_dict(kind_of(values), values)
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


def kind_of(values: dict[str, Any]) -> type[LMConfig | SDSATConfig | HeadRunConfig]:
    """The config's class, by its sections, or else by the keys of [model].

    Raises:
      InputError: they suit several programs, whose layouts of documents may differ.
    """
    for section, kind in SECTIONS.items():
        if section in values:
            return kind
    model = values.get("model", {})
    if not isinstance(model, dict) or not model.get("init_from", model.get("model_name_or_path")):
        return LMConfig  # only a new model starts from nothing
    kinds = []
    for kind in dict.fromkeys(SECTIONS.values()):
        keys = vars(kind.model)
        if all(key in keys for key in renamed("model", model, keys)):
            kinds.append(kind)
    if len(kinds) > 1:
        raise InputError(
            "the config suits several programs: add a section that tells which one, [distill] for "
            "train.lm, [sdsat] or [head]; it may be empty"
        )
    return kinds[0] if kinds else LMConfig


def _report(directory: str, manifest: dict[str, Any]) -> str:
    """Lines about what was made and what was left out."""
    return "\n".join(
        [f"{directory}: {len(manifest['shards'])} shards", *inventory_of(manifest).lines()]
    )
