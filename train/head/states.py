"""Hidden states of a target that were stored ahead of training (``python -m train.states``).

A directory has shards of packed rows, each a safetensors file, and a manifest that says of which
target, corpus and settings they are. The manifest is written last. A shard holds the four int32
arrays ``[R, T]`` of packed rows, and the target's states ``[R, T, D]`` and ``[R, T, P, D]`` in the
dtype of its forward pass.

Axes: R rows of a shard, T tokens of a row, P auxiliary layers of the target, D its hidden size.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax._util.errors import InputError, errors_as
from specjax.models.hf.delta import fingerprint
from specjax.models.hf.files import open_tensors, read_json
from train.config import HeadRunConfig, to_dict
from train.data.loader import Loader, ValidBatch
from train.data.packing import Batch, stack, without_answers
from train.head.prepare import HeadSetup

FORMAT = 1
PLAN = "plan.json"
MANIFEST = "manifest.json"
TRAINING = "training"  # the two kinds of rows: how their shards' names begin
HELD_OUT = "held-out"
READ_THREADS = 4  # that read ahead while a step runs


def identity(cfg: HeadRunConfig, setup: HeadSetup) -> dict[str, Any]:
    """What stored states depend on, by the key of the config that decides it."""
    model = json.dumps(to_dict(setup.target), sort_keys=True, default=str)
    target = f"{fingerprint(setup.directory)} {model}"
    return {
        "model.init_from": hashlib.sha256(target.encode()).hexdigest(),
        "data": setup.data.fingerprint,
        "data.weights": list(cfg.data.weights),
        "data.seq_len": cfg.data.seq_len,
        "model.compute_dtype": cfg.model.compute_dtype,
        "head.layers": list(setup.head.layer_ids),
        "optim.batch_size": cfg.optim.batch_size,
        "run.eval_batches": cfg.run.eval_batches,
        "run.seed": cfg.run.seed,
    }


def require_identity(home: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises InputError if states were stored for another target, corpus or setting.

    Args:
      before: of a plan or manifest.
      now: :func:`identity` of this run.
    """
    for name, value in now.items():
        if before.get(name) == value:
            continue
        if name == "model.init_from":
            what = "another target, or its weights have changed"
        elif name == "data":
            what = "another corpus, tokenizer or layout"
        else:
            what = f"{name}={before.get(name)}, now it is {value}"
        raise InputError(
            f"head.states={str(home)!r} was stored for {what}: set it back, or store the states "
            "in another directory (python -m train.states)"
        )


def shard_name(kind: str, number: int) -> str:
    """The file of one shard of training or held-out rows."""
    return f"{kind}-{number:05}.safetensors"


@dataclasses.dataclass(eq=False)
class StoredStates:
    """The rows of a finished directory.

    Attributes:
      home: the directory.
      rows, held_out_rows: the number of rows of each kind.
      rows_per_shard: R; the last shard of a kind may have fewer.
      seed: fixes the order in which rows are read again.
    """

    home: Path
    rows: int
    held_out_rows: int
    rows_per_shard: int
    seed: int
    _epoch_order: tuple[int, np.ndarray] | None = None

    def training_row(self, row: Batch, number: int) -> Batch:
        """The stored row for row ``number`` of the run: a :class:`train.data.packing.Transform`.

        A run that needs more rows than are stored reads all of them again, each time in another
        order.

        Raises:
          InputError: ``row`` is not the row that was stored, or a shard cannot be read.
        """
        epoch, place = divmod(number, self.rows)
        if epoch:
            place = int(self._order(epoch)[place])
        stored = self._read(TRAINING, place)
        if not epoch:
            self._require_same(without_answers(row), stored, place)
        return stored

    def held_out(self, batches: Sequence[ValidBatch]) -> Iterator[ValidBatch]:
        """The held-out batches of this process, whose rows are read when they are needed."""
        process = jax.process_index()
        count = jax.process_count()
        first = 0
        for batch in batches:
            size = len(batch.rows["tokens"]) * count
            numbers = range(first, first + size)[process::count]
            first += size
            yield batch._replace(rows=functools.partial(self._held_out_rows, batch.rows, numbers))

    def _held_out_rows(self, rows: Batch, numbers: Sequence[int]) -> Batch:
        stored = [self._read(HELD_OUT, number) for number in numbers]
        for i, (row, number) in enumerate(zip(stored, numbers, strict=True)):
            self._require_same({name: x[i] for name, x in rows.items()}, row, number)
        return stack(stored)

    def _order(self, epoch: int) -> np.ndarray:
        """The order of the rows in a further epoch."""
        # Read the attribute once: another thread may set it to the next epoch.
        latest = self._epoch_order
        if latest is None or latest[0] != epoch:
            bits = np.random.Philox(key=np.array([self.seed, epoch], np.uint64))
            latest = (epoch, np.random.Generator(bits).permutation(self.rows))
            self._epoch_order = latest
        return latest[1]

    def _read(self, kind: str, number: int) -> Batch:
        """One stored row; raises InputError if its shard cannot be read."""
        shard, place = divmod(number, self.rows_per_shard)
        path = self.home / shard_name(kind, shard)
        handle = open_tensors(path)
        with errors_as(f"{path}: row {place} cannot be read"):
            names = list(handle.keys())
            return {name: handle.get_slice(name)[place : place + 1][0] for name in names}

    def _require_same(self, row: Batch, stored: Batch, number: int) -> None:
        for name, x in row.items():
            if not np.array_equal(x, stored[name]):
                raise InputError(
                    f"head.states={str(self.home)!r}: row {number} has other {name} than the "
                    "corpus: store the states again (python -m train.states)"
                )


class HeadLoader:
    """A loader whose state says how many rows are stored, too.

    The first rows are the corpus's, stored or not. A run that has read all of the stored ones reads
    them again, so from there on its rows depend on their number.

    Args:
      batch_size: rows of a batch, of all processes.
      stored: the number of stored rows; None: the rows are those of the corpus.
    """

    def __init__(self, loader: Loader, batch_size: int, stored: int | None):
        self._loader = loader
        self._batch_size = batch_size
        self._stored = stored
        self._read = 0  # rows

    def __iter__(self) -> HeadLoader:
        return self

    def __next__(self) -> Batch:
        self._read += self._batch_size
        return next(self._loader)

    def get_state(self) -> dict[str, Any]:
        return {"loader": self._loader.get_state(), "read": self._read, "stored": self._stored}

    def set_state(self, state: dict[str, Any]) -> None:
        """Raises InputError if the rows so far are not those of so many stored rows."""
        if "stored" not in state:  # of a checkpoint from before rows could be stored
            state = {"loader": state, "read": 0, "stored": None}
        before = state["stored"]
        read = state["read"]
        limits = [stored for stored in (before, self._stored) if stored is not None]
        if before != self._stored and read > min(limits):
            raise InputError(
                f"--resume: the run has read {read} rows of {_source(before)}, now they are those "
                f"of {_source(self._stored)}: set head.states back, or start a new run in another "
                "run.dir"
            )
        self._read = read
        self._loader.set_state(state["loader"])


def _source(stored: int | None) -> str:
    return "the corpus" if stored is None else f"{stored} stored ones"


def open_states(cfg: HeadRunConfig, setup: HeadSetup) -> StoredStates | None:
    """The states that ``head.states`` names; None if it names none.

    Raises:
      InputError: they are not complete, or are of another target, corpus or setting.
    """
    if not cfg.head.states:
        return None
    home = Path(cfg.head.states)
    manifest = read_manifest(home)
    if manifest is None:
        raise InputError(
            f"head.states={cfg.head.states!r} has no {MANIFEST}: python -m train.states with this "
            "config stores the states, or goes on with it"
        )
    require_identity(home, manifest["identity"], identity(cfg, setup))
    for name, size in manifest["bytes"].items():
        path = home / name
        found = path.stat().st_size if path.exists() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes, not {size}"
            raise InputError(
                f"{path} {state}: remove {MANIFEST}, and python -m train.states makes it anew"
            )
    return StoredStates(
        home, manifest["rows"], manifest["held_out_rows"], manifest["rows_per_shard"], cfg.run.seed
    )


def read_manifest(home: Path) -> dict[str, Any] | None:
    """The manifest of a finished directory; None if there is none.

    Raises:
      InputError: it is of another version.
    """
    path = home / MANIFEST
    if not os.path.lexists(path):  # false, too, for a name that no file can have
        return None
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        raise InputError(f"{path}: format {manifest.get('format')}, expected {FORMAT}: remove it")
    return manifest
