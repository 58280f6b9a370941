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
import numpy as np
from tokenizers import Tokenizer

from specjax.models import ModelConfig, init_params, save_pretrained
from train.data.corpus import Document
from train.data.tokenizer import EOS_ID, train_tokenizer

ROOT = Path(__file__).parents[2]
TINY_LM = str(ROOT / "configs" / "tiny.toml")
TINY_SDSAT = str(ROOT / "configs" / "sdsat_tiny.toml")
HEAD_DEMO = str(ROOT / "configs" / "head_demo.toml")
SMALL_HEAD = (
    *("data.corpora=[]", 'data.files=["specjax"]', "data.seq_len=48"),
    *(
        "head.layers=[0]",
        "head.draft_vocab=128",
        "head.num_kv_heads=1",
        "head.intermediate_size=16",
    ),
    *("head.steps=2", "head.decode_prompts=2", "head.decode_tokens=12"),
    *("optim.total_steps=6", "optim.batch_size=4", "optim.accumulate=1", "optim.warmup_steps=1"),
    *("run.log_every=1", "run.eval_every=6", "run.eval_batches=1", "run.checkpoint_every=2"),
    "run.export_dtype=float32",
)


def overrides(*settings: str) -> list[str]:
    """Arguments that set ``section.key=value``."""
    return [word for setting in settings for word in ("--set", setting)]


def head_arguments(target: Path, directory: Path, *settings: str) -> list[str]:
    """Arguments of ``train.head``: a small head for ``target``, trained in ``directory``."""
    places = (f"model.init_from={target}", f"run.dir={directory}")
    return [HEAD_DEMO, *overrides(*places, *SMALL_HEAD, *settings)]


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


def random_program(number: int, lines: int = 12) -> str:
    """A program that shares no eight tokens with another's."""
    rng = np.random.default_rng(number)
    return "".join(f"{rng.integers(1 << 60):x} = {rng.integers(1 << 60)}\n" for _ in range(lines))


def program_tokenizer(home: Path) -> Tokenizer:
    """A tokenizer of 300 ids, trained on such a program."""
    documents = [Document("a", random_program(0, 200))]
    return train_tokenizer(documents, 300, home / "tokenizer.json")


def code() -> list[Document]:
    """Files of the standard library: a change of our code must not change the tokens."""
    modules = argparse, ast, dataclasses, enum, inspect, pathlib, tempfile, textwrap
    return [Document(module.__name__, inspect.getsource(module)) for module in modules]


def save_checkpoint(directory: Path, tokenizer: Tokenizer, **other: Any) -> Path:
    """A random model's Hugging Face directory, by default of one layer, of width 16."""
    sizes = {"hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "num_layers": 1}
    rest = {"eos_ids": (EOS_ID,), "max_position": 128}
    cfg = ModelConfig.llama(**{"vocab_size": tokenizer.get_vocab_size()} | sizes | rest | other)
    save_pretrained(directory, cfg, init_params(cfg, jax.random.key(1)), tokenizer.to_str())
    return directory
