"""``train.tokens``: whose config it is, how its documents become tokens, and what was made."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from specjax._util.errors import InputError
from specjax.lm import locate
from specjax.models.hf.read import load_config
from train.config import DataSection, HeadRunConfig, LMConfig, SDSATConfig, from_dict, read_toml
from train.data.fim import CodeLayout, frame_of
from train.data.making import make_shards, recipe_of
from train.data.packing import Layout, Plain
from train.head.prepare import read_target
from train.lm.prepare import get_tokenizer
from train.sdsat.prepare import prepare_setup


def run(args: argparse.Namespace) -> int:
    """The program; returns the exit code."""
    if args.processes < 0:
        raise InputError(f"--processes {args.processes}: expected 0 or more")
    data, tokenizer, layout = read_config(read_toml(args.config, args.set))
    manifest = make_shards(data, recipe_of(data, tokenizer, layout), args.processes)
    print(json.dumps(manifest) if args.json else _told(data.shards, manifest))
    return 0


def read_config(values: dict[str, Any]) -> tuple[DataSection, Tokenizer, Layout]:
    """(data, tokenizer, layout) of the program whose sections a config has.

    Raises:
      InputError, ModelError: the config asks for no shards, or does not go together.
    """
    kind = {"sdsat": SDSATConfig, "head": HeadRunConfig}
    cfg = from_dict(next((kind[name] for name in kind if name in values), LMConfig), values)
    if not cfg.data.shards:
        raise InputError("data.shards is empty: name a directory for the tokens")
    if isinstance(cfg, SDSATConfig):
        setup = prepare_setup(cfg)
        return cfg.data, setup.tokenizer, setup.layout
    if isinstance(cfg, HeadRunConfig):
        return cfg.data, *read_target(cfg)[2:]
    tokenizer, start = get_tokenizer(cfg, None, Path()), cfg.model.init_from
    if not start:
        return cfg.data, tokenizer, Plain()
    return cfg.data, tokenizer, CodeLayout(*frame_of(start, load_config(locate(start)), tokenizer))


def _told(directory: str, manifest: dict[str, Any]) -> str:
    """What was made and what was left out, a line for each."""
    documents, tokens = manifest["documents"], manifest["tokens"]
    lines = [
        f"{directory}: {len(manifest['shards'])} shards",
        f"training: {documents['train']:,} documents, {tokens['train']:,} tokens",
        f"held out: {documents['held_out']:,} documents, {tokens['held_out']:,} tokens",
        f"left out: {documents['duplicates']:,} copies, {documents['near_duplicates']:,} "
        "near-duplicates of held-out documents",
    ]
    for reason, entry in manifest["skipped"].items():
        examples = ", ".join(entry["examples"])
        lines.append(f"skipped, {reason}: {entry['count']:,} (such as {examples})")
    return "\n".join(lines)
