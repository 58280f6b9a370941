"""A whole run of ``train.lm``: pre-training, from scratch or a checkpoint, or distillation."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import specjax as sj
from specjax import text
from specjax._util import processes
from specjax._util.errors import InputError
from specjax.lm import locate
from specjax.models import ModelConfig, num_params, param_shapes
from train.config import LMConfig, fixed_settings, to_dict
from train.data.corpus import permissive_distributions
from train.data.loader import epoch_tokens
from train.data.prompts import held_out_prompts, sample_text
from train.data.tokenized import Corpus, held_out_tokens, train_tokens
from train.engine.batches import process_batches, text_counts, with_total_steps
from train.engine.directory import export, lock_directory, small_files
from train.engine.drafting import measure_drafts
from train.engine.loop import Measured, fit
from train.engine.operations import causal_operations
from train.engine.optim import make_optimizer
from train.engine.placement import (
    Placement,
    host_memory,
    planned_devices,
    run_placement,
)
from train.engine.program import run_training, with_next_command
from train.engine.shares import Shares
from train.lm.losses import data_loss, training_loss
from train.lm.prepare import LmSetup, prepare_setup, teachers


def run(args: argparse.Namespace) -> int:
    """Runs the program; returns the exit code."""
    return run_training("train.lm", LMConfig, main, args)


def main(cfg: LMConfig, resume: bool, dry_run: bool) -> dict[str, Any]:
    """Trains as the config says; returns the summary that ``--json`` prints."""
    if dry_run:
        return _dry_run(cfg)
    with lock_directory(cfg.run, resume) as directory:
        placement = processes.raise_everywhere(
            lambda: run_placement(cfg.mesh, cfg.optim.batch_size)
        )
        cache = directory.parent / "cache"
        setup = processes.main_process_first(lambda: prepare_setup(cfg, directory, cache, resume))
        cfg = with_total_steps(cfg, setup.data)
        processes.check_agreement(
            config=cfg, model=setup.model, corpus=setup.data.fingerprint, jax=jax.__version__
        )
        return train(cfg, setup, placement, resume)


def _dry_run(cfg: LMConfig) -> dict[str, Any]:
    """The plan. Nothing stays on the disk, and shards must be there."""
    planned_devices(cfg.mesh, cfg.optim.batch_size)
    with tempfile.TemporaryDirectory() as scratch:
        setup = prepare_setup(cfg, Path(scratch), None)
    return plan(with_total_steps(cfg, setup.data), setup.model, setup.data)


def train(cfg: LMConfig, setup: LmSetup, placement: Placement, resume: bool) -> dict[str, Any]:
    """Trains and exports; returns the summary. Every process calls this, the first one writes."""
    model = setup.model
    data = setup.data
    placement = placement.of_models(model, *teachers(cfg))
    rows = placement.row_sharding(0)
    # In the host's memory: one device may be too small for the params that all of them share.
    with host_memory():
        loss, frozen = processes.raise_everywhere(
            lambda: training_loss(cfg, model, setup.tokenizer, rows)
        )
        params = processes.raise_everywhere(setup.first_params)
    loader, valid = process_batches(cfg, data)
    outcome = fit(
        loss,
        params,
        make_optimizer(cfg.optim),
        loader,
        run=cfg.run,
        optim=cfg.optim,
        eval_loss=data_loss(
            model, cfg.model.compute_dtype, rows=rows, byte_counts=byte_counts(setup)
        ),
        valid=valid,
        frozen=frozen,
        resume=resume,
        fixed=fixed_settings("train.lm", cfg, model, data.fingerprint),
        placement=placement,
        operations=useful_operations(cfg, model),
        counts=text_counts(cfg, data),
        recipe=to_dict(cfg),
        measure=_measure(cfg, setup, placement),
    )
    summary = plan(cfg, model, data)
    card = summary | {"recipe": to_dict(cfg)}
    if "installed" in cfg.data.corpora:
        card["installed_packages"] = permissive_distributions()
    params = placement.to_host(outcome.params)
    start = cfg.model.init_from
    copied = small_files(locate(start) if start else None, cfg.tokenizer.path)
    summary |= export(cfg.run, model, params, setup.tokenizer, outcome, card, copied)
    teacher = cfg.distill.teacher
    chats = locate(teacher) if teacher and data.apart else None
    return with_next_command(summary, cfg.data, teacher, chats)


def _measure(
    cfg: LMConfig, setup: LmSetup, placement: Placement
) -> Callable[[dict, Any], Measured] | None:
    """A function of the draft's and the teacher's params that decodes held-out prompts.

    With ``distill.decode_prompts`` the draft drafts for its teacher. With ``run.sample_tokens``
    the model continues a text alone.
    """
    if cfg.distill.teacher and cfg.distill.decode_prompts:
        return _measure_drafts(cfg, setup, placement)
    if cfg.run.keep_best == "accepted":
        raise InputError(
            'run.keep_best="accepted" needs evaluations that decode a draft: '
            "set distill.teacher and distill.decode_prompts"
        )
    prompts = held_out_prompts(setup.data, 1, setup.model.max_position - cfg.run.sample_tokens)
    if not cfg.run.sample_tokens or not prompts:
        return None

    def measure(params: dict, frozen: Any) -> Measured:
        model = sj.from_params(setup.model, placement.local_copy(params))
        out = sj.generate(model, prompts, max_new_tokens=cfg.run.sample_tokens)
        return Measured({}, sample_text(setup.tokenizer, prompts, out.tokens[0].tolist()))

    return measure


def _measure_drafts(
    cfg: LMConfig, setup: LmSetup, placement: Placement
) -> Callable[[dict, Any], Measured] | None:
    """A function that measures how well the draft drafts for its teacher."""
    section = cfg.distill
    [teacher] = teachers(cfg)
    context = min(setup.model.max_position, teacher.max_position)
    room = context - section.decode_tokens - section.decode_length
    prompts = held_out_prompts(setup.data, section.decode_prompts, room)
    if not prompts:
        return None

    def measure(params: dict, frozen: dict) -> Measured:
        figures, written = measure_drafts(
            sj.from_params(teacher, placement.local_copy(frozen)),
            sj.from_params(setup.model, placement.local_copy(params)),
            prompts,
            section.decode_length,
            section.decode_tokens,
        )
        return Measured(figures, sample_text(setup.tokenizer, prompts, written))

    return measure


def byte_counts(setup: LmSetup) -> np.ndarray:
    """`[V]` float32: the UTF-8 bytes of each id; special tokens have none."""
    counts = np.zeros(setup.model.vocab_size, np.float32)
    token_bytes = text.Tokenizer(setup.tokenizer).token_bytes()
    counts[: len(token_bytes)] = [len(x) for x in token_bytes]
    return counts


def useful_operations(cfg: LMConfig, model: ModelConfig) -> float:
    """FLOPs per token of a step: forward and backward, and a teacher's forward pass."""
    length = cfg.data.seq_len
    # The backward pass takes twice the FLOPs of the forward pass.
    operations = 3 * causal_operations(model, length)
    for teacher in teachers(cfg):
        operations += causal_operations(teacher, length)
    return operations


def plan(cfg: LMConfig, model: ModelConfig, data: Corpus) -> dict[str, Any]:
    """What the run will do, in numbers."""
    tokens = cfg.optim.batch_size * cfg.optim.accumulate * cfg.data.seq_len
    devices = planned_devices(cfg.mesh, cfg.optim.batch_size)
    epoch = epoch_tokens(data, cfg.data.seq_len)
    shares = Shares(cfg.mesh.fsdp, cfg.mesh.model).of_models(model)
    return {
        "parameters": num_params(model),
        "vocab_size": model.vocab_size,
        "train_tokens": train_tokens(data),
        "held_out_tokens": held_out_tokens(data),
        "tokens_per_step": tokens,
        "steps": cfg.optim.total_steps,
        "epochs": round(tokens * cfg.optim.total_steps / max(1, epoch), 2),
        # Params, gradients and two moments, each of four bytes.
        "state_megabytes": round(16 * num_params(model) / 1e6, 1),
        "devices": devices,
        "state_megabytes_per_device": round(
            4 * shares.bytes_per_device(param_shapes(model)) / 1e6, 1
        ),
    }
