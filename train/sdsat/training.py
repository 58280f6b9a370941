"""SDSAT: fine-tunes a checkpoint to draft for itself: a config's whole run."""

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
from specjax.lm import absolute_name
from specjax.models import load_pretrained, num_params, param_shapes
from specjax.models.adapters import KEY
from specjax.models.hf.delta import save_delta
from train.config import SDSATConfig, fixed_settings, to_dict
from train.data.packing import Corpus, held_out_tokens, train_tokens
from train.data.prompts import held_out_prompts
from train.engine.directory import export, export_as, own_directory, require_room
from train.engine.feeding import own_batches, own_corpus
from train.engine.loop import fit
from train.engine.losses import cast
from train.engine.metrics import require_sinks
from train.engine.optim import make_optimizer
from train.engine.placement import Placement, host_memory, run_placement
from train.engine.program import carry_out
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
from train.sdsat.prepare import SdsatRun, check_absent, prepare_setup, transforms
from train.sdsat.trainable import TABLES

# Small files of the checkpoint that the exported one needs as they are.
COPIED = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "tokenizer.model",
    "chat_template.jinja",
)


def run(args: argparse.Namespace) -> int:
    """The program; returns the exit code."""
    return carry_out("train.sdsat", SDSATConfig, main, args)


def main(cfg: SDSATConfig, resume: bool, dry_run: bool) -> dict[str, Any]:
    """Tunes as the config says; returns the summary that ``--json`` prints."""
    if dry_run:
        setup = processes.raise_everywhere(lambda: prepare_setup(cfg))
        needs = needed_memory(cfg, setup)
        where = needs["compiled_for"], needs["devices"]
        return plan(cfg, setup) | needs | run_hours(cfg, setup.model, *where)
    with own_directory(cfg.run, resume) as directory:
        placement = processes.raise_everywhere(lambda: _make_ready(cfg, resume))
        setup, data = processes.first_then_all(lambda: read(cfg, directory.parent / "cache"))
        processes.agree(config=cfg, model=setup.model, corpus=data.fingerprint, jax=jax.__version__)
        about = plan(cfg, setup) | _epochs(cfg, data)
        return about | train(cfg, setup, data, placement, about, resume)


def _make_ready(cfg: SDSATConfig, resume: bool) -> Placement:
    """Where the run's arrays will lie; what would fail late fails here, before any text is read."""
    require_sinks(cfg.run)
    placement, setup = run_placement(cfg.mesh, cfg.optim.batch_size), prepare_setup(cfg)
    if processes.leads() and not resume:
        trainable = jax.eval_shape(setup.tuning.split, param_shapes(setup.model))[0]
        state = jax.eval_shape(make_optimizer(cfg.optim).init, trainable)
        require_room(cfg.run, (trainable, state))
    return placement


def read(cfg: SDSATConfig, cache: Path | None) -> tuple[SdsatRun, Corpus]:
    """Everything but the weights; ``cache`` as for :func:`own_corpus`."""
    setup = prepare_setup(cfg)
    data = own_corpus(cfg.data, setup.tokenizer, setup.layout, cache)
    check_absent(setup, data)
    return setup, data


def train(
    cfg: SDSATConfig,
    setup: SdsatRun,
    data: Corpus,
    placement: Placement,
    about: dict[str, Any],
    resume: bool,
) -> dict[str, Any]:
    """Fits and exports, ``about`` in the card. Every process of a run does; the first writes."""
    model, tuning = setup.model, setup.tuning
    with host_memory():  # one device may be too small for what all of them share
        trainable, frozen = processes.raise_everywhere(lambda: tuning.split(first_params(setup)))
    loader, valid = own_batches(cfg, data, *transforms(cfg, setup.insertion))
    lie = placement.row_sharding(0)
    held_out = probe_loss(model, cfg.sdsat.held_out_window, cfg.model.compute_dtype, lie)
    outcome = fit(
        tuning.over_trained(sdsat_loss(model, setup.objective, lie)),
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
    )
    params = tuning.merge(placement.host(outcome.params), frozen)
    card = about | {"recipe": to_dict(cfg)}
    if tuning.gated:
        where, dtype = (absolute_name(cfg.model.init_from), setup.directory), cfg.run.export_dtype
        save = functools.partial(save_delta, *where, model, params[KEY], dtype)
        return export_as(cfg.run, save, outcome, card)
    copied = [path for name in COPIED if (path := setup.directory / name).exists()]
    return export(cfg.run, model, params, setup.tokenizer, outcome, card, copied)


def _measure(
    cfg: SDSATConfig, setup: SdsatRun, data: Corpus, placement: Placement
) -> Callable[[dict, dict], dict[str, Any]]:
    """Decoding figures as a function of what is trained and what is not.

    Every process decodes all prompts on one of its devices, which takes a copy of the params
    (:func:`train.sdsat.memory.evaluation` counts it).
    """
    section = cfg.sdsat
    evaluated = cfg.run.eval_batches * cfg.optim.batch_size * cfg.data.seq_len
    prompts = held_out_prompts(data, section.decode_prompts, evaluated)
    decoding = Decoding(prompts, section.decode_tokens, section.held_out_window)
    dtype = cfg.model.compute_dtype

    def measure(trainable: dict, frozen: dict) -> dict[str, Any]:
        merged = setup.tuning.merge(trainable, frozen)
        # As the forward pass has them, before a device takes all of them.
        params = placement.local(placement.made(lambda tree: cast(tree, dtype), merged))
        return measure_decoding(setup.model, setup.insertion, decoding, params)

    return measure


def first_params(setup: SdsatRun) -> dict:
    """The checkpoint's weights, its tables ready for the adaptive ids where they hold them."""
    start, params = load_pretrained(setup.directory)
    if setup.tuning.gated:
        return params
    fresh = tuple(sorted(set(setup.model.adaptive_ids) - set(start.adaptive_ids)))
    return grow(params, fresh, setup.new_rows) if fresh else params


def grow(params: dict, ids: tuple[int, ...], new_rows: int) -> dict:
    """Embedding and head with ``new_rows`` more rows, and every row ``ids`` at the mean.

    The mean is over the other rows; unused vocabulary may hold anything, even zeros.
    """
    rows = np.asarray(ids)

    def extend(table):
        others = np.setdiff1d(np.arange(len(table)), rows)
        mean = jnp.mean(table[others], axis=0)
        grown = jnp.concatenate([table, jnp.zeros((new_rows, table.shape[1]), table.dtype)])
        return grown.at[rows].set(mean)

    return params | {name: extend(params[name]) for name in TABLES if name in params}


def plan(cfg: SDSATConfig, setup: SdsatRun) -> dict[str, Any]:
    """What the run will do, in numbers; clean tokens are the corpus's, which is not read."""
    rows = cfg.optim.batch_size * cfg.optim.accumulate
    section, length = cfg.sdsat, cfg.data.seq_len
    own, improved = (
        forward_flops(setup.model, dataclasses.replace(section, loss=loss), length)
        for loss in (section.loss, "improved")
    )
    trainable = jax.eval_shape(setup.tuning.split, param_shapes(setup.model))[0]
    moments = jax.eval_shape(make_optimizer(cfg.optim).init, trainable)
    # Master weights, and of what is trained: gradients and moments.
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
        "teraflops_per_step": round(3 * rows * own / 1e12, 3),
        "compute_against_improved": round(own / improved, 3),
        "steps": cfg.optim.total_steps,
        "state_megabytes": round(state / 1e6, 1),
    }


def _epochs(cfg: SDSATConfig, data: Corpus) -> dict[str, Any]:
    """How often the run sees its corpus."""
    tokens = cfg.optim.batch_size * cfg.optim.accumulate * cfg.data.seq_len * cfg.optim.total_steps
    return {
        "train_tokens": train_tokens(data),
        "held_out_tokens": held_out_tokens(data),
        "epochs": round(tokens / max(1, train_tokens(data)), 2),
    }
