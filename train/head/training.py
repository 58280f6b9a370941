"""EAGLE-3 heads: a config's whole run."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax._util import processes
from specjax.models import head_matrix, init_params, load_pretrained, num_params
from train.config import HeadRunConfig, fixed_settings, to_dict
from train.data.packing import held_out_tokens, train_tokens
from train.data.prompts import held_out_prompts
from train.engine.directory import export, own_directory
from train.engine.feeding import own_batches
from train.engine.loop import fit
from train.engine.optim import make_optimizer
from train.engine.placement import Placement, host_memory, run_placement
from train.engine.program import carry_out
from train.head.evaluation import measure_decoding
from train.head.losses import HeadObjective, head_loss
from train.head.prepare import HeadRun, prepare_setup


def run(args: argparse.Namespace) -> int:
    """The program; returns the exit code."""
    return carry_out("train.head", HeadRunConfig, main, args)


def main(cfg: HeadRunConfig, resume: bool, dry_run: bool) -> dict[str, Any]:
    """Trains as the config says; returns the summary that ``--json`` prints."""
    if dry_run:
        return plan(cfg, prepare_setup(cfg, None))
    with own_directory(cfg.run, resume) as directory:
        placement = processes.raise_everywhere(
            lambda: run_placement(cfg.mesh, cfg.optim.batch_size)
        )
        setup = processes.first_then_all(lambda: prepare_setup(cfg, directory.parent / "cache"))
        processes.agree(config=cfg, corpus=setup.data.fingerprint, jax=jax.__version__)
        return plan(cfg, setup) | train(cfg, setup, placement, resume)


def train(cfg: HeadRunConfig, setup: HeadRun, placement: Placement, resume: bool) -> dict[str, Any]:
    """Fits and exports. Every process of a run does; the first writes."""
    section, data, head = cfg.head, setup.data, setup.head
    dtype = jnp.dtype(cfg.model.compute_dtype)
    with host_memory():  # one device may be too small for what all of them share
        _, target = processes.raise_everywhere(lambda: load_pretrained(setup.directory, dtype))
        params = first_params(setup, target, cfg.run.seed)
    loader, valid = own_batches(cfg, data)
    objective = HeadObjective(
        section.steps, section.decay, cfg.model.compute_dtype, cfg.model.remat
    )
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
        # Which ids are drafted follows from the corpus and their number.
        fixed=fixed_settings(
            "train.head", cfg, dataclasses.replace(head, draft_ids=None), data.fingerprint
        ),
        measure=_measure(cfg, setup, placement),
        placement=placement,
    )
    card = plan(cfg, setup) | {"recipe": to_dict(cfg)}
    return export(cfg.run, head, placement.host(outcome.params), setup.tokenizer, outcome, card)


def first_params(setup: HeadRun, target: dict, seed: int) -> dict:
    """Random weights in float32, but the output table and, of one kind, its norm: the target's."""
    head = setup.head
    params = init_params(head, jax.random.key(seed))
    table = head_matrix(setup.target, target)
    params["head"] = (table if head.ids is None else table[head.ids]).astype(jnp.float32)
    if setup.target.norm == head.norm:
        params["norm"] = jax.tree.map(lambda x: x.astype(jnp.float32), target["norm"])
    return params


def _measure(
    cfg: HeadRunConfig, setup: HeadRun, placement: Placement
) -> Callable[[dict, dict], dict[str, Any]]:
    """Decoding figures as a function of the head's params and the target's."""
    section = cfg.head
    evaluated = cfg.run.eval_batches * cfg.optim.batch_size * cfg.data.seq_len
    prompts = held_out_prompts(setup.data, section.decode_prompts, evaluated)

    def measure(params: dict, target: dict) -> dict[str, Any]:
        own, other = placement.local(params), placement.local(target)
        sizes = (section.steps, section.decode_tokens)
        return measure_decoding(setup.target, other, setup.head, own, prompts, *sizes)

    return measure


def plan(cfg: HeadRunConfig, setup: HeadRun) -> dict[str, Any]:
    """What the run will do, in numbers."""
    tokens = cfg.optim.batch_size * cfg.optim.accumulate * cfg.data.seq_len
    count, width = num_params(setup.head), jnp.dtype(cfg.model.compute_dtype).itemsize
    stored = jnp.dtype(cfg.run.export_dtype).itemsize
    # Master weights, gradient and two moments of the head; the target's weights alone.
    state = 16 * count + width * num_params(setup.target)
    return {
        "parameters": count,
        "target_parameters": num_params(setup.target),
        "draft_vocabulary": setup.head.draft_size,
        "draft_vocabulary_covers": round(setup.coverage, 4),
        "layers_read": list(setup.head.layer_ids),
        "tokens_per_step": tokens,
        "steps": cfg.optim.total_steps,
        "train_tokens": train_tokens(setup.data),
        "held_out_tokens": held_out_tokens(setup.data),
        "epochs": round(tokens * cfg.optim.total_steps / max(1, train_tokens(setup.data)), 2),
        "state_megabytes_per_copy": round(state / 1e6, 1),
        "export_megabytes": round(stored * count / 1e6, 2),
    }
