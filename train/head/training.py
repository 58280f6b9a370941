"""A whole run of ``train.head``: trains an EAGLE-3 head and exports it."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import specjax as sj
from specjax._util import processes
from specjax._util.waiting import waiting
from specjax.models import ModelConfig, load_pretrained, num_params, param_shapes
from train.config import HeadRunConfig, fixed_settings, to_dict
from train.data.loader import Loader, ValidBatch, epoch_tokens
from train.data.prompts import held_out_prompts, sample_text
from train.data.tokenized import Corpus, held_out_tokens, train_tokens
from train.engine.batches import process_batches, text_counts, with_total_steps
from train.engine.directory import (
    export,
    lock_directory,
    small_files,
    without_local_paths,
)
from train.engine.drafting import measure_drafts
from train.engine.loop import Measured, fit
from train.engine.optim import make_optimizer
from train.engine.placement import Placement, host_memory, planned_devices, run_placement
from train.engine.program import run_training, with_next_command
from train.head.losses import HeadObjective, head_loss
from train.head.prepare import HeadSetup, prepare_setup
from train.head.starting import first_params
from train.head.states import READ_THREADS, HeadLoader, StoredStates, open_states


def run(args: argparse.Namespace) -> int:
    """Runs the program; returns the exit code."""
    return run_training("train.head", HeadRunConfig, main, args)


def main(cfg: HeadRunConfig, resume: bool, dry_run: bool) -> dict[str, Any]:
    """Trains as the config says; returns the summary that ``--json`` prints."""
    if dry_run:
        setup = prepare_setup(cfg, None)
        cfg = with_total_steps(cfg, setup.data)
        return plan(cfg, setup, open_states(cfg, setup))
    with lock_directory(cfg.run, resume) as directory:
        placement = processes.raise_everywhere(
            lambda: run_placement(cfg.mesh, cfg.optim.batch_size)
        )
        setup = processes.main_process_first(lambda: prepare_setup(cfg, directory.parent / "cache"))
        cfg = with_total_steps(cfg, setup.data)
        processes.check_agreement(config=cfg, corpus=setup.data.fingerprint, jax=jax.__version__)
        states = processes.raise_everywhere(lambda: open_states(cfg, setup))
        return plan(cfg, setup, states) | train(cfg, setup, states, placement, resume)


def train(
    cfg: HeadRunConfig,
    setup: HeadSetup,
    states: StoredStates | None,
    placement: Placement,
    resume: bool,
) -> dict[str, Any]:
    """Trains and exports; returns the summary. Every process calls this, the first one writes.

    Args:
      states: the target's hidden states; None: each step computes them.
    """
    data = setup.data
    head = setup.head
    placement = placement.of_models(head, setup.target)
    dtype = jnp.dtype(cfg.model.compute_dtype)
    # In the host's memory: one device may be too small for the params that all of them share.
    with host_memory(), waiting(f"loading {setup.directory}"):
        _, target = processes.raise_everywhere(
            lambda: load_pretrained(setup.directory, dtype, only_tables=states is not None)
        )
        params = processes.raise_everywhere(
            lambda: first_params(head, setup.start, setup.target, target, cfg.run.seed)
        )
    loader, valid = _batches(cfg, data, states)
    objective = _objective(cfg)
    loss = functools.partial(head_loss, setup.target, head, rows=placement.row_sharding(0))
    outcome = fit(
        loss(objective),
        params,
        make_optimizer(cfg.optim),
        loader,
        run=cfg.run,
        optim=cfg.optim,
        eval_loss=loss(dataclasses.replace(objective, remat=False)),
        valid=valid,
        frozen=target,
        resume=resume,
        # The draft ids follow from the corpus and head.draft_vocab, which are compared anyway.
        fixed=fixed_settings(
            "train.head", cfg, dataclasses.replace(head, draft_ids=None), data.fingerprint
        ),
        measure=None if states else _measure(cfg, setup, placement),
        placement=placement,
        counts=text_counts(cfg, data),
        recipe=to_dict(cfg),
    )
    card = plan(cfg, setup, states) | {"recipe": to_dict(cfg)}
    params = placement.to_host(outcome.params)
    # The config of a published head names its target as others find it.
    home = Path(cfg.run.dir) / "export"
    head = dataclasses.replace(head, verifier=without_local_paths(head.verifier, home))
    copied = small_files(setup.directory, cfg.model.tokenizer)
    summary = export(cfg.run, head, params, setup.tokenizer, outcome, card, copied)
    chats = setup.directory if data.apart else None
    return with_next_command(summary, cfg.data, cfg.model.init_from, chats)


def _objective(cfg: HeadRunConfig) -> HeadObjective:
    section = cfg.head
    return HeadObjective(
        section.steps,
        section.decay,
        cfg.model.compute_dtype,
        cfg.model.remat,
        section.drop_outside,
        section.mean_per_step,
    )


def _batches(
    cfg: HeadRunConfig, data: Corpus, states: StoredStates | None
) -> tuple[Loader, list[ValidBatch]]:
    """:func:`process_batches`, with the target's states where they are stored."""
    batch = cfg.optim.batch_size
    if states is None:
        loader, valid = process_batches(cfg, data)
        return HeadLoader(loader, batch, None), valid
    loader, valid = process_batches(cfg, data, states.training_row, threads=READ_THREADS)
    return HeadLoader(loader, batch, states.rows), list(states.held_out(valid))


def _measure(
    cfg: HeadRunConfig, setup: HeadSetup, placement: Placement
) -> Callable[[dict, dict], Measured] | None:
    """A function of the head's and the target's params that measures decoding."""
    section = cfg.head
    room = setup.target.max_position - section.decode_tokens - section.steps
    prompts = held_out_prompts(setup.data, section.decode_prompts, room)
    if not prompts:
        return None

    def measure(params: dict, target: dict) -> Measured:
        figures, written = measure_drafts(
            sj.from_params(setup.target, placement.local_copy(target)),
            sj.from_params(setup.head, placement.local_copy(params)),
            prompts,
            section.steps,
            section.decode_tokens,
        )
        return Measured(figures, sample_text(setup.tokenizer, prompts, written))

    return measure


def _params_outside_layers(target: ModelConfig) -> int:
    """The number of parameters outside of the target's layers."""
    shapes = param_shapes(target)
    return sum(x.size for name in shapes if name != "layers" for x in jax.tree.leaves(shapes[name]))


def plan(cfg: HeadRunConfig, setup: HeadSetup, states: StoredStates | None) -> dict[str, Any]:
    """What the run will do, in numbers."""
    tokens = cfg.optim.batch_size * cfg.optim.accumulate * cfg.data.seq_len
    count = num_params(setup.head)
    # With stored states only the target's embedding and LM head are loaded.
    loaded = num_params(setup.target) if states is None else _params_outside_layers(setup.target)
    target_bytes = jnp.dtype(cfg.model.compute_dtype).itemsize * loaded
    # Of the head four float32 arrays: master weights, gradient and two moments.
    state = 16 * count + target_bytes
    export_bytes = jnp.dtype(cfg.run.export_dtype).itemsize * count
    stored = {} if states is None else {"stored_rows": states.rows}
    epoch = epoch_tokens(setup.data, cfg.data.seq_len)
    return stored | {
        "parameters": count,
        "target_parameters": num_params(setup.target),
        "draft_vocabulary": setup.head.draft_size,
        "draft_vocabulary_covers": round(setup.coverage, 4),
        "layers_read": list(setup.head.layer_ids),
        "tokens_per_step": tokens,
        "steps": cfg.optim.total_steps,
        "train_tokens": train_tokens(setup.data),
        "held_out_tokens": held_out_tokens(setup.data),
        "epochs": round(tokens * cfg.optim.total_steps / max(1, epoch), 2),
        "state_megabytes_per_copy": round(state / 1e6, 1),
        "devices": planned_devices(cfg.mesh, cfg.optim.batch_size),
        "export_megabytes": round(export_bytes / 1e6, 2),
    }
