"""Helpers of the training tests: shipped configs, tiny checkpoints, logged records."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import inspect
import json
import pathlib
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import jax
from tokenizers import Tokenizer

from specjax.models import ModelConfig, init_params, save_pretrained
from train.data.corpus import Document
from train.data.tokenizer import EOS_ID, train_tokenizer

ROOT = Path(__file__).parents[2]
TINY_LM = str(ROOT / "configs" / "tiny.toml")
TINY_SDSAT = str(ROOT / "configs" / "sdsat_tiny.toml")


def overrides(*settings: str) -> list[str]:
    """Arguments that set ``section.key=value``."""
    return [word for setting in settings for word in ("--set", setting)]


def logged(directory: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def repeatable(directory):
    """The run's records without fields such as times, which differ between equal runs."""
    times = ("tokens_per_second", "seconds", "valid_seconds")
    return [{k: v for k, v in r.items() if not k.startswith(times)} for r in logged(directory)]


def small_tokenizer(home: Path) -> Tokenizer:
    """A tokenizer of 400 tokens."""
    return train_tokenizer(code(), 400, home / "tokenizer.json")


def code() -> list[Document]:
    """Files of the standard library: a change of our code must not change the tokens."""
    modules = argparse, ast, dataclasses, enum, inspect, pathlib, tempfile, textwrap
    return [Document(module.__name__, inspect.getsource(module)) for module in modules]


def save_checkpoint(directory: Path, tokenizer: Tokenizer, **other: Any) -> Path:
    """A random model's Hugging Face directory, of one layer of width 16."""
    cfg = ModelConfig.llama(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        intermediate_size=24,
        max_position=128,
        **{"eos_ids": (EOS_ID,)} | other,
    )
    save_pretrained(directory, cfg, init_params(cfg, jax.random.key(1)), tokenizer.to_str())
    return directory
