"""The work of ``train.states``: computes a target's hidden states and writes them as shards.

Axes: as in :mod:`train.head.states`; B rows of a batch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax._util.errors import InputError, ModelError
from specjax._util.files import locked, write_text
from specjax._util.program import require_output
from specjax._util.waiting import waiting
from specjax.models import hidden_states, load_pretrained
from specjax.models.hf.files import open_tensors, read_json
from specjax.models.hf.write import save_tensors
from train.config import HeadRunConfig, from_toml
from train.data.loader import epoch_tokens, training_rows, valid_batches
from train.data.packing import Batch, stack, without_answers
from train.engine.batches import with_total_steps
from train.engine.losses import row_arguments
from train.engine.placement import Placement, host_memory, run_placement
from train.engine.program import print_summary
from train.head.losses import AUX, HIDDEN
from train.head.prepare import HeadSetup, prepare_setup
from train.head.states import (
    FORMAT,
    HELD_OUT,
    MANIFEST,
    PLAN,
    TRAINING,
    identity,
    read_manifest,
    require_identity,
    shard_name,
)

SHARD_BYTES = 1 << 28  # about; a shard has one batch at least, and is in memory once
ROW_ARRAYS = 4  # int32 [T] arrays of a packed row


class _Plan(NamedTuple):
    """What is stored: of which run, how many rows, in shards of how many rows."""

    identity: dict[str, Any]
    rows: int
    held_out_rows: int
    rows_per_shard: int
    row_bytes: int

    @property
    def total_bytes(self) -> int:
        return (self.rows + self.held_out_rows) * self.row_bytes

    def shards(self) -> Iterator[tuple[str, int, range]]:
        """(kind, number, rows) of each shard."""
        for kind, count in ((TRAINING, self.rows), (HELD_OUT, self.held_out_rows)):
            for number, first in enumerate(range(0, count, self.rows_per_shard)):
                yield kind, number, range(first, min(first + self.rows_per_shard, count))

    def summary(self) -> dict[str, Any]:
        """The plan in numbers, for the user."""
        return {
            "rows": self.rows,
            "held_out_rows": self.held_out_rows,
            "tokens": (self.rows + self.held_out_rows) * self.identity["data.seq_len"],
            "shards": len(list(self.shards())),
            "megabytes": round(self.total_bytes / 1e6, 1),
        }


def run(args: argparse.Namespace) -> int:
    """Runs the program; returns the exit code."""
    cfg = from_toml(HeadRunConfig, args.config, args.set)
    if args.rows < 0:
        raise InputError(f"--rows {args.rows}: expected 0 or more")
    if not cfg.head.states:
        raise InputError("head.states is empty: name a directory for the hidden states")
    home = Path(cfg.head.states)
    if args.dry_run:
        require_output()
        setup = prepare_setup(cfg, None)
        cfg = with_total_steps(cfg, setup.data)
        print_summary(_make_plan(cfg, setup, args.rows).summary(), args.json)
        return 0

    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"head.states={cfg.head.states!r}: {error.strerror}") from None
    with locked(home, "head.states"):
        placement = run_placement(cfg.mesh, cfg.optim.batch_size)
        setup = prepare_setup(cfg, Path(cfg.run.dir).parent / "cache")  # as train.head does
        cfg = with_total_steps(cfg, setup.data)
        plan = _make_plan(cfg, setup, args.rows)
        _store(home, cfg, setup, plan, placement)
    print_summary(plan.summary() | {"states": str(home)}, args.json)
    return 0


def _make_plan(cfg: HeadRunConfig, setup: HeadSetup, rows: int) -> _Plan:
    """The plan of a config.

    Args:
      rows: training rows; 0: those of the run, but at most one epoch.
    """
    batch = cfg.optim.batch_size
    length = cfg.data.seq_len
    if not rows:
        needed = batch * cfg.optim.accumulate * cfg.optim.total_steps
        rows = min(needed, -(-epoch_tokens(setup.data, length) // length))
    held_out = valid_batches(setup.data, length, batch, cfg.run.eval_batches)

    values = (setup.head.parts + 1) * setup.target.hidden_size
    token_bytes = values * jnp.dtype(cfg.model.compute_dtype).itemsize + 4 * ROW_ARRAYS
    row_bytes = length * token_bytes
    batches_per_shard = max(1, SHARD_BYTES // (batch * row_bytes))
    return _Plan(
        identity=identity(cfg, setup),
        # Whole batches: a batch of another size could be computed in another order.
        rows=-(-rows // batch) * batch,
        held_out_rows=batch * len(held_out),
        rows_per_shard=batch * batches_per_shard,
        row_bytes=row_bytes,
    )


def _store(
    home: Path, cfg: HeadRunConfig, setup: HeadSetup, plan: _Plan, placement: Placement
) -> None:
    """Makes the shards that are missing, then the manifest."""
    manifest = read_manifest(home)
    if manifest is not None:
        _require_plan(home, manifest, plan)
        return
    for scratch in home.glob(".*.tmp"):
        scratch.unlink(missing_ok=True)  # left by a killed run
    _begin(home, plan)

    missing = [shard for shard in plan.shards() if not _is_whole(home, *shard)]
    _require_space(home, plan, missing)
    if missing:
        compute = _make_compute(cfg, setup, placement)
        read = _make_reader(cfg, setup)
        for done, (kind, number, rows) in enumerate(missing):
            print(f"states: shard {done + 1} of {len(missing)}", file=sys.stderr, flush=True)
            batches = range(rows.start, rows.stop, cfg.optim.batch_size)
            tensors = _compute_shard([(kind, first) for first in batches], read, compute)
            save_tensors(home / shard_name(kind, number), tensors)

    sizes = {}
    for kind, number, _ in plan.shards():
        name = shard_name(kind, number)
        sizes[name] = (home / name).stat().st_size
    write_text(home / MANIFEST, json.dumps(_as_json(plan) | {"bytes": sizes}, indent=1) + "\n")


def _as_json(plan: _Plan) -> dict[str, Any]:
    return {"format": FORMAT, **plan._asdict()}


def _begin(home: Path, plan: _Plan) -> None:
    """Writes plan.json; raises InputError if another plan was begun here."""
    path = home / PLAN
    if path.exists():
        _require_plan(home, read_json(path), plan)
    else:
        write_text(path, json.dumps(_as_json(plan), indent=1) + "\n")


def _require_plan(home: Path, before: dict[str, Any], plan: _Plan) -> None:
    """Raises InputError if a plan or manifest is not of this ``plan``."""
    require_identity(home, before.get("identity", {}), plan.identity)
    for name, value in _as_json(plan).items():
        if before.get(name) != value:
            raise InputError(
                f"head.states={str(home)!r} was begun with {name}={before.get(name)}, now it is "
                f"{value}: ask for as many rows, or choose another directory"
            )


def _is_whole(home: Path, kind: str, number: int, rows: range) -> bool:
    """Whether a shard is finished."""
    path = home / shard_name(kind, number)
    if not path.exists():
        return False
    try:
        return open_tensors(path).get_slice(HIDDEN).get_shape()[0] == len(rows)
    except ModelError:
        return False  # it is made anew


def _require_space(home: Path, plan: _Plan, missing: list) -> None:
    """Says how much is written; raises InputError if the disk has less room."""
    wanted = sum(len(rows) for _, _, rows in missing) * plan.row_bytes
    free = shutil.disk_usage(home).free
    summary = plan.summary()
    print(
        f"states: {summary['rows']:,} training and {summary['held_out_rows']:,} held-out rows in "
        f"{summary['shards']:,} shards, {plan.total_bytes / 1e9:,.2f} GB; "
        f"{wanted / 1e9:,.2f} GB are still to be written",
        file=sys.stderr,
        flush=True,
    )
    if wanted > free:
        raise InputError(
            f"head.states={str(home)!r} has {free / 1e9:,.1f} GB free, and the states need "
            f"{wanted / 1e9:,.1f}: lower --rows, or choose another disk"
        )


ReadBatch = Callable[[str, int], Batch]  # (kind, number of its first row) -> [B, T] arrays
Compute = Callable[[Batch], dict[str, jax.Array]]


def _make_reader(cfg: HeadRunConfig, setup: HeadSetup) -> ReadBatch:
    """A function that gives packed rows, as a run of ``train.head`` reads them."""
    batch = cfg.optim.batch_size
    length = cfg.data.seq_len
    training = training_rows(setup.data, length, cfg.run.seed)
    held_out = valid_batches(setup.data, length, batch, cfg.run.eval_batches)

    def read(kind: str, first: int) -> Batch:
        if kind == HELD_OUT:
            return held_out[first // batch].rows
        return stack([without_answers(training[first + i]) for i in range(batch)])

    return read


def _make_compute(cfg: HeadRunConfig, setup: HeadSetup, placement: Placement) -> Compute:
    """A function that starts to compute the states of a batch, over all devices."""
    placement = placement.of_models(setup.target)
    rows = placement.row_sharding(0)
    target = setup.target
    layers = setup.head.layer_ids
    with host_memory(), waiting(f"loading {setup.directory}"):
        _, params = load_pretrained(setup.directory, jnp.dtype(cfg.model.compute_dtype))
    params = placement.place_state(params)

    @jax.jit
    def compute(params, batch):
        hidden, aux = hidden_states(
            target, params, *row_arguments(batch), aux_layers=layers, rows=rows
        )
        return {HIDDEN: hidden, AUX: aux}

    return lambda batch: compute(params, placement.place_rows(batch, 0))


def _compute_shard(
    places: list[tuple[str, int]], read: ReadBatch, compute: Compute
) -> dict[str, np.ndarray]:
    """The tensors of one shard, ``[R, ...]`` each."""
    parts: list[dict[str, np.ndarray]] = []
    started: tuple[Batch, dict[str, jax.Array]] | None = None
    for kind, first in places:
        batch = read(kind, first)
        # The device works on this batch while the one before is copied to the host.
        following = (batch, compute(batch))
        if started is not None:
            parts.append(_fetched(*started))
        started = following
    assert started is not None, "a shard has rows"
    parts.append(_fetched(*started))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _fetched(batch: Batch, states: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    return batch | {name: np.asarray(x) for name, x in states.items()}
