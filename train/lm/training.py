"""Pre-training, from scratch or onward, and distillation of drafts: a config's whole run."""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from tokenizers import Tokenizer

from specjax.errors import InputError
from specjax.models import ModelConfig, init_params, load_pretrained, num_params
from train.config import LMConfig, fixed_settings, from_toml, to_dict
from train.data.corpus import permissive_distributions
from train.data.fim import CodeLayout, frame_of
from train.data.making import own_documents, own_shards
from train.data.packing import (
    Corpus,
    Layout,
    Plain,
    held_out_tokens,
    make_loader,
    prepare,
    train_tokens,
    valid_batches,
)
from train.data.reading import Document
from train.data.tokenizer import EOS_ID, load_tokenizer, train_tokenizer
from train.engine.directory import export, own_directory
from train.engine.ending import finish
from train.engine.loop import LossFn, fit
from train.engine.losses import Head, chunked_distillation, hidden_of
from train.engine.optim import make_optimizer


def run(args: argparse.Namespace) -> int:
    """The program; returns the exit code."""
    cfg = from_toml(LMConfig, args.config, args.set)
    return finish("train.lm", lambda: main(cfg, args.resume, args.dry_run), args.json)


def main(cfg: LMConfig, resume: bool, dry_run: bool) -> dict[str, Any]:
    """Trains as the config says; returns the summary that ``--json`` prints."""
    if dry_run:
        return _dry_run(cfg)
    with own_directory(cfg.run, resume) as directory:
        return train(cfg, directory, resume)


def _dry_run(cfg: LMConfig) -> dict[str, Any]:
    """The plan; nothing is left on the disk, and shards must be there."""
    documents = read_documents(cfg)
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = get_tokenizer(cfg, documents, Path(scratch))
    model, _ = build_model(cfg, tokenizer.get_vocab_size())
    laid = layout(cfg, model, tokenizer)
    if documents is None:
        return plan(cfg, model, own_shards(cfg.data, tokenizer, laid, make=False))
    return plan(cfg, model, prepare(documents, tokenizer, None, laid))


def train(cfg: LMConfig, directory: Path, resume: bool) -> dict[str, Any]:
    """Fits and exports."""
    documents = read_documents(cfg)
    tokenizer = get_tokenizer(cfg, documents, directory)
    model, first_params = build_model(cfg, tokenizer.get_vocab_size())
    laid = layout(cfg, model, tokenizer)
    if documents is None:
        data = own_shards(cfg.data, tokenizer, laid)
    else:
        data = prepare(documents, tokenizer, directory.parent / "cache", laid)
    loss, frozen = training_loss(cfg, model)
    rows = cfg.optim.batch_size
    outcome = fit(
        loss,
        first_params(),
        make_optimizer(cfg.optim),
        make_loader(data, cfg.data.seq_len, rows, cfg.run.seed),
        run=cfg.run,
        optim=cfg.optim,
        eval_loss=data_loss(model),
        valid=valid_batches(data, cfg.data.seq_len, rows, cfg.run.eval_batches),
        frozen=frozen,
        resume=resume,
        fixed=fixed_settings("train.lm", cfg, model, data.fingerprint),
    )
    if outcome.valid_loss is not None:
        # Nats per token, over bytes per token, in bits.
        bits = outcome.valid_loss * held_out_tokens(data) / data.valid_bytes / math.log(2)
        outcome = dataclasses.replace(outcome, valid_extras={"bits_per_byte": bits})
    summary = plan(cfg, model, data)
    card = summary | {"recipe": to_dict(cfg)}
    if "installed" in cfg.data.corpora:
        card["installed_packages"] = permissive_distributions()
    return summary | export(cfg.run, model, outcome.params, tokenizer, outcome, card)


def read_documents(cfg: LMConfig) -> list[Document] | None:
    """The corpus; None where its tokens are in shards, so that it is read as a stream."""
    return None if cfg.data.shards else own_documents(cfg.data)


def layout(cfg: LMConfig, model: ModelConfig, tokenizer: Tokenizer) -> Layout:
    """How a document becomes tokens: of a checkpoint, between its own ids."""
    start = cfg.model.init_from
    return CodeLayout(*frame_of(start, model, tokenizer)) if start else Plain()


def training_loss(cfg: LMConfig, model: ModelConfig) -> tuple[LossFn, dict | None]:
    """(the loss that the config asks for, the params of its teacher)."""
    if not cfg.distill.teacher:
        return data_loss(model), None
    teacher, params = load_pretrained(cfg.distill.teacher)
    if teacher.vocab_size != model.vocab_size:
        raise InputError(
            f"distill.teacher={cfg.distill.teacher!r} has {teacher.vocab_size} "
            f"ids, the draft {model.vocab_size}: share the tokenizer"
        )
    return distillation_loss(model, teacher, cfg.distill.alpha, cfg.distill.temperature), params


def data_loss(cfg: ModelConfig) -> LossFn:
    """Cross-entropy of the next token, summed, and the number of tokens."""

    def loss(params, frozen, batch):
        return Head.of(cfg, params).cross_entropy(hidden_of(cfg, params, batch), batch["labels"])

    return loss


def distillation_loss(
    cfg: ModelConfig, teacher: ModelConfig, alpha: float, temperature: float
) -> LossFn:
    """The draft's loss; ``frozen`` are the teacher's params."""

    def loss(params, frozen, batch):
        own = (Head.of(cfg, params), hidden_of(cfg, params, batch))
        others = Head.of(teacher, frozen), jax.lax.stop_gradient(hidden_of(teacher, frozen, batch))
        return chunked_distillation(*own, *others, batch["labels"], alpha, temperature)

    return loss


def build_model(cfg: LMConfig, vocab_size: int) -> tuple[ModelConfig, Callable[[], dict]]:
    """The architecture, and a function that makes its first params.

    Raises:
      InputError: the tokenizer has more ids, or the rows more tokens, than it takes.
    """
    if cfg.model.init_from:
        model, params = load_pretrained(cfg.model.init_from)
    else:
        sizes = {name: value for name, value in vars(cfg.model).items() if name != "init_from"}
        sizes |= {"vocab_size": vocab_size, "num_kv_heads": cfg.model.num_kv_heads or None}
        model, params = ModelConfig.llama(**sizes, eos_ids=(EOS_ID,), bos_id=EOS_ID), None
    if model.vocab_size < vocab_size:
        raise InputError(
            f"model.init_from={cfg.model.init_from!r} has {model.vocab_size} ids, the "
            f"tokenizer {vocab_size}: set tokenizer.path to the checkpoint's own"
        )
    if cfg.data.seq_len > model.max_position:
        raise InputError(
            f"data.seq_len={cfg.data.seq_len} is longer than the model's context "
            f"({model.max_position}): lower it, or raise model.max_position"
        )
    return model, lambda: params or init_params(model, jax.random.key(cfg.run.seed))


def get_tokenizer(cfg: LMConfig, documents: list[Document] | None, directory: Path) -> Tokenizer:
    """The configured tokenizer, or one trained on the corpus and kept in the run.

    Raises:
      InputError: none is configured, and the corpus is not in memory; or it cannot be read.
    """
    if documents is None and not cfg.tokenizer.path:
        raise InputError(
            "data.shards needs tokenizer.path: a run on a part of the corpus, without data.shards, "
            "trains one"
        )
    if cfg.tokenizer.path:
        return load_tokenizer(cfg.tokenizer.path)
    own = directory / "tokenizer.json"
    if own.exists():
        return load_tokenizer(own)
    return train_tokenizer(documents, cfg.tokenizer.vocab_size, own)


def plan(cfg: LMConfig, model: ModelConfig, data: Corpus) -> dict[str, Any]:
    """What the run will do, in numbers; memory counts params, gradients and two moments."""
    tokens = cfg.optim.batch_size * cfg.optim.accumulate * cfg.data.seq_len
    there = train_tokens(data)
    return {
        "parameters": num_params(model),
        "vocab_size": model.vocab_size,
        "train_tokens": there,
        "held_out_tokens": held_out_tokens(data),
        "tokens_per_step": tokens,
        "steps": cfg.optim.total_steps,
        "epochs": round(tokens * cfg.optim.total_steps / max(1, there), 2),
        "state_megabytes": round(16 * num_params(model) / 1e6, 1),
    }
