"""Pre-training, from scratch or onward, and distillation of drafts: a config's whole run."""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import jax

from specjax._util import processes
from specjax.models import ModelConfig, num_params
from specjax.models.hf.read import load_config
from train.config import LMConfig, fixed_settings, to_dict
from train.data.corpus import permissive_distributions
from train.data.packing import Corpus, held_out_tokens, train_tokens
from train.engine.directory import export, own_directory
from train.engine.feeding import own_batches
from train.engine.loop import fit
from train.engine.operations import causal_operations
from train.engine.optim import make_optimizer
from train.engine.placement import Placement, host_memory, run_placement
from train.engine.program import carry_out
from train.lm.losses import data_loss, training_loss
from train.lm.prepare import LmRun, prepare_setup


def run(args: argparse.Namespace) -> int:
    """The program; returns the exit code."""
    return carry_out("train.lm", LMConfig, main, args)


def main(cfg: LMConfig, resume: bool, dry_run: bool) -> dict[str, Any]:
    """Trains as the config says; returns the summary that ``--json`` prints."""
    if dry_run:
        return _dry_run(cfg)
    with own_directory(cfg.run, resume) as directory:
        placement = processes.raise_everywhere(
            lambda: run_placement(cfg.mesh, cfg.optim.batch_size)
        )
        cache = directory.parent / "cache"
        setup = processes.first_then_all(lambda: prepare_setup(cfg, directory, cache))
        facts = {"model": setup.model, "corpus": setup.data.fingerprint}
        processes.agree(config=cfg, **facts, jax=jax.__version__)
        return train(cfg, setup, placement, resume)


def _dry_run(cfg: LMConfig) -> dict[str, Any]:
    """The plan; nothing is left on the disk, and shards must be there."""
    with tempfile.TemporaryDirectory() as scratch:
        setup = prepare_setup(cfg, Path(scratch), None)
    return plan(cfg, setup.model, setup.data)


def train(cfg: LMConfig, setup: LmRun, placement: Placement, resume: bool) -> dict[str, Any]:
    """Fits and exports. Every process of a run does; the first writes."""
    tokenizer, model, first_params, data = setup
    lie = placement.row_sharding(0)
    with host_memory():  # one device may be too small for what all of them share
        loss, frozen = processes.raise_everywhere(lambda: training_loss(cfg, model, lie))
        params = first_params()
    loader, valid = own_batches(cfg, data)
    outcome = fit(
        loss,
        params,
        make_optimizer(cfg.optim),
        loader,
        run=cfg.run,
        optim=cfg.optim,
        eval_loss=data_loss(model, cfg.model.compute_dtype, rows=lie),
        valid=valid,
        frozen=frozen,
        resume=resume,
        fixed=fixed_settings("train.lm", cfg, model, data.fingerprint),
        placement=placement,
        operations=useful_operations(cfg, model),
    )
    if outcome.valid_loss is not None:
        # Nats per token, over bytes per token, in bits.
        bits = outcome.valid_loss * held_out_tokens(data) / data.valid_bytes / math.log(2)
        outcome = dataclasses.replace(outcome, valid_extras={"bits_per_byte": bits})
    summary = plan(cfg, model, data)
    card = summary | {"recipe": to_dict(cfg)}
    if "installed" in cfg.data.corpora:
        card["installed_packages"] = permissive_distributions()
    params = placement.host(outcome.params)
    return summary | export(cfg.run, model, params, tokenizer, outcome, card)


def useful_operations(cfg: LMConfig, model: ModelConfig) -> float:
    """Of a step, per token: forward and backward, and a teacher's forward pass."""
    length = cfg.data.seq_len
    taught = load_config(Path(cfg.distill.teacher)) if cfg.distill.teacher else None
    teacher = causal_operations(taught, length) if taught else 0.0
    return 3 * causal_operations(model, length) + teacher


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
