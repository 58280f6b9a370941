"""A whole run of ``train.sdsat``: fine-tunes a checkpoint to draft for itself, and exports it."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax._util import processes
from specjax._util.waiting import waiting
from specjax.lm import name_beside
from specjax.models import load_pretrained, num_params, param_shapes
from specjax.models.adapters import KEY
from specjax.models.hf.delta import save_delta
from specjax.text.tokenizer import template_digest
from train.config import SDSATConfig, fixed_settings, to_dict
from train.data.loader import epoch_tokens
from train.data.prompts import held_out_prompts, sample_text
from train.data.tokenized import Corpus, held_out_tokens, train_tokens
from train.engine.batches import (
    open_corpus,
    process_batches,
    text_counts,
    with_total_steps,
)
from train.engine.directory import (
    export,
    export_with,
    lock_directory,
    require_disk_space,
    small_files,
)
from train.engine.loop import Measured, RunResult, fit
from train.engine.losses import cast
from train.engine.metrics import require_trackers
from train.engine.optim import make_optimizer
from train.engine.placement import Placement, host_memory, run_placement
from train.engine.program import SELF_DRAFTING, run_training, with_next_command
from train.sdsat.dryrun import needed_memory
from train.sdsat.evaluation import Decoding, measure_decoding
from train.sdsat.losses import probe_loss, sdsat_loss, weigh
from train.sdsat.operations import (
    forward_flops,
    row_tokens,
    run_hours,
    sequences_of,
    useful_operations,
)
from train.sdsat.prepare import SdsatSetup, check_absent, prepare_setup, transforms
from train.sdsat.trainable import TABLES


def run(args: argparse.Namespace) -> int:
    """Runs the program; returns the exit code."""
    return run_training("train.sdsat", SDSATConfig, main, args)


def main(cfg: SDSATConfig, resume: bool, dry_run: bool) -> dict[str, Any]:
    """Tunes as the config says; returns the summary that ``--json`` prints."""
    if dry_run:
        setup = processes.raise_everywhere(lambda: prepare_setup(cfg))
        if cfg.optim.num_epochs:  # only then the corpus is read for a plan
            cfg = with_total_steps(cfg, read(cfg, None)[1])
        memory = needed_memory(cfg, setup)
        hours = run_hours(cfg, setup.model, memory["compiled_for"], memory["devices"])
        return plan(cfg, setup) | memory | hours

    with lock_directory(cfg.run, resume) as directory:
        placement = processes.raise_everywhere(lambda: _check_early(cfg, resume))
        setup, data = processes.main_process_first(lambda: read(cfg, directory.parent / "cache"))
        cfg = with_total_steps(cfg, data)
        processes.check_agreement(
            config=cfg, model=setup.model, corpus=data.fingerprint, jax=jax.__version__
        )
        about = plan(cfg, setup) | _epochs(cfg, data)
        return about | train(cfg, setup, data, placement, about, resume)


def _check_early(cfg: SDSATConfig, resume: bool) -> Placement:
    """The run's placement. What would fail late is checked here, before any text is read."""
    require_trackers(cfg.run)
    placement = run_placement(cfg.mesh, cfg.optim.batch_size)
    setup = prepare_setup(cfg)
    if processes.is_main_process() and not resume:
        trainable = jax.eval_shape(setup.tuning.split, param_shapes(setup.model))[0]
        state = jax.eval_shape(make_optimizer(cfg.optim).init, trainable)
        require_disk_space(cfg.run, (trainable, state))
    return placement


def read(cfg: SDSATConfig, cache: Path | None) -> tuple[SdsatSetup, Corpus]:
    """Everything that a run needs but its weights; ``cache`` is as for :func:`open_corpus`."""
    setup = prepare_setup(cfg)
    data = open_corpus(cfg.data, setup.tokenizer, setup.layout, cache, chats=setup.chats)
    check_absent(setup, data)
    return setup, data


def train(
    cfg: SDSATConfig,
    setup: SdsatSetup,
    data: Corpus,
    placement: Placement,
    about: dict[str, Any],
    resume: bool,
) -> dict[str, Any]:
    """Trains and exports; returns the summary. Every process calls this, the first one writes.

    Args:
      about: entries for the export's card.
    """
    model = setup.model
    tuning = setup.tuning
    placement = placement.of_models(model)
    # In the host's memory: one device may be too small for the params that all of them share.
    with host_memory():
        trainable, frozen = processes.raise_everywhere(lambda: tuning.split(first_params(setup)))

    layouts = transforms(cfg, setup.insertion)
    loader, valid = process_batches(cfg, data, layouts.training, layouts.held_out)
    rows = placement.row_sharding(0)
    held_out = probe_loss(model, cfg.sdsat.held_out_window, cfg.model.compute_dtype, rows)
    outcome = fit(
        tuning.over_trained(sdsat_loss(model, setup.objective, rows)),
        trainable,
        make_optimizer(cfg.optim),
        loader,
        run=cfg.run,
        optim=cfg.optim,
        eval_loss=tuning.over_trained(held_out),
        valid=valid,
        frozen=frozen,
        resume=resume,
        fixed=fixed_settings("train.sdsat", cfg, model, data.fingerprint),
        weigh=functools.partial(weigh, setup.objective),
        measure=_measure(cfg, setup, data, placement),
        placement=placement,
        operations=useful_operations(cfg, setup.model),
        counts=text_counts(cfg, data),
        recipe=to_dict(cfg),
    )
    params = tuning.merge(placement.to_host(outcome.params), frozen)
    card = about | {"recipe": to_dict(cfg)}
    summary = _export(cfg, setup, params, outcome, card, data.apart)
    chats = setup.start.directory if data.apart else None
    return with_next_command(summary, cfg.data, SELF_DRAFTING, chats)


def _export(
    cfg: SDSATConfig,
    setup: SdsatSetup,
    params: dict,
    outcome: RunResult,
    card: dict[str, Any],
    has_chats: bool,
) -> dict[str, Any]:
    """Exports the model, or for gated updates a delta to the checkpoint.

    Args:
      card: entries for the export's card.
      has_chats: whether the corpus has conversations.
    """
    if setup.tuning.gated:
        save = functools.partial(
            save_delta,
            name_beside(setup.start.base_name, Path(cfg.run.dir) / "export"),
            setup.start.directory,
            setup.model,
            params[KEY],
            cfg.run.export_dtype,
            template_digest(setup.chats.template) if has_chats else "",
        )
        return export_with(save, cfg.run, outcome, card)
    copied = small_files(setup.start.directory, cfg.model.tokenizer)
    return export(cfg.run, setup.model, params, setup.tokenizer, outcome, card, copied)


def _measure(
    cfg: SDSATConfig, setup: SdsatSetup, data: Corpus, placement: Placement
) -> Callable[[dict, dict], Measured] | None:
    """A function of the trainable and the frozen params that measures decoding.

    Every process decodes all prompts on one of its devices, which needs a whole copy of the
    params (:func:`train.sdsat.memory.evaluation` counts it).
    """
    section = cfg.sdsat
    room = setup.model.max_position - section.decode_tokens - section.held_out_window
    prompts = held_out_prompts(data, section.decode_prompts, room)
    if not prompts:
        return None
    decoding = Decoding(prompts, section.decode_tokens, section.held_out_window)
    dtype = cfg.model.compute_dtype

    def measure(trainable: dict, frozen: dict) -> Measured:
        merged = setup.tuning.merge(trainable, frozen)
        # Cast while they are split over devices: one device may not hold them in float32.
        small = placement.initialize(lambda tree: cast(tree, dtype), merged)
        params = placement.local_copy(small)
        figures, written = measure_decoding(setup.model, setup.insertion, decoding, params)
        return Measured(figures, sample_text(setup.tokenizer, prompts, written))

    return measure


def first_params(setup: SdsatSetup) -> dict:
    """The checkpoint's weights, with rows of embedding and LM head for new adaptive ids.

    Gated adapters hold these rows themselves: then both stay as they are.
    """
    with waiting(f"loading {setup.start.directory}"):
        start, params = load_pretrained(setup.start.directory)
    new_ids = tuple(sorted(set(setup.model.adaptive_ids) - set(start.adaptive_ids)))
    if setup.tuning.gated or not new_ids:
        return params
    return grow(params, new_ids, setup.new_rows)


def grow(params: dict, ids: tuple[int, ...], new_rows: int) -> dict:
    """Embedding and LM head with ``new_rows`` more rows; the rows ``ids`` are set to the mean.

    The mean is over the other rows. Rows of unused vocabulary may hold anything, even zeros, and
    would be a bad start. A bias on the logits is 0 for new rows.
    """
    rows = np.asarray(ids)

    def extend(table):
        others = np.setdiff1d(np.arange(len(table)), rows)
        mean = jnp.mean(table[others], axis=0)
        grown = jnp.concatenate([table, jnp.zeros((new_rows, table.shape[1]), table.dtype)])
        return grown.at[rows].set(mean)

    grown = params | {name: extend(params[name]) for name in TABLES if name in params}
    if "head_bias" in params:
        grown["head_bias"] = jnp.pad(params["head_bias"], (0, new_rows))
    return grown


def plan(cfg: SDSATConfig, setup: SdsatSetup) -> dict[str, Any]:
    """What the run will do, in numbers. The corpus is not read for it."""
    rows = cfg.optim.batch_size * cfg.optim.accumulate
    section = cfg.sdsat
    length = cfg.data.seq_len
    flops = forward_flops(setup.model, section, length)
    improved = dataclasses.replace(section, loss="improved")
    improved_flops = forward_flops(setup.model, improved, length)

    trainable = jax.eval_shape(setup.tuning.split, param_shapes(setup.model))[0]
    moments = jax.eval_shape(make_optimizer(cfg.optim).init, trainable)
    # Master weights of all params; gradients and moments of the trainable ones.
    state = 4 * num_params(setup.model) + sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((trainable, moments))
    )
    return {
        "parameters": num_params(setup.model),
        "trained_parameters": sum(leaf.size for leaf in jax.tree.leaves(trainable)),
        "vocab_size": setup.model.vocab_size,
        "adaptive_ids": sorted(set(setup.model.adaptive_ids)),
        "new_rows": setup.new_rows,
        "clean_tokens_per_step": rows * length,
        "forward_tokens_per_step": rows * row_tokens(section, length) * sequences_of(section),
        "teraflops_per_step": round(3 * rows * flops / 1e12, 3),
        "compute_against_improved": round(flops / improved_flops, 3),
        "steps": cfg.optim.total_steps,
        "state_megabytes": round(state / 1e6, 1),
    }


def _epochs(cfg: SDSATConfig, data: Corpus) -> dict[str, Any]:
    """The size of the corpus, and the epochs that the run trains on it."""
    step_tokens = cfg.optim.batch_size * cfg.optim.accumulate * cfg.data.seq_len
    tokens = step_tokens * cfg.optim.total_steps
    return {
        "train_tokens": train_tokens(data),
        "held_out_tokens": held_out_tokens(data),
        "epochs": round(tokens / max(1, epoch_tokens(data, cfg.data.seq_len)), 2),
    }
