"""Build the shards of a config's corpus in several processes; finished shards survive a kill."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from specjax._util.errors import InputError
from specjax._util.files import locked, write_text
from train.config import DataSection
from train.data.chats import ChatFormat
from train.data.corpus import load_corpus, nothing_to_read, source_files, source_labels
from train.data.encoding import Layout
from train.data.hub import is_on_hub
from train.data.progress import ByteProgress
from train.data.reading import Document, Intake, TextPiece, cut
from train.data.shards.files import (
    EVALUATION,
    MANIFEST,
    PARTS,
    PLAN,
    SOURCES,
    DamagedError,
    cannot_write,
    read_json,
    read_part,
    require_identity,
)
from train.data.shards.index import write_index
from train.data.shards.reading import Shards, open_shards, read_manifest
from train.data.shards.sources import check_sources, record_sources
from train.data.shards.workers import run_in_processes
from train.data.shards.writing import Recipe, make_shard

SHARD_BYTES = 1 << 27  # of text in a shard, about


class _Task(NamedTuple):
    """A shard to make: the number of its source, and the pieces of files that it holds."""

    source: int
    pieces: list[TextPiece]


def recipe_of(
    data: DataSection, tokenizer: Tokenizer, layout: Layout, chats: ChatFormat | None = None
) -> Recipe:
    """The recipe of a config's shards."""
    return Recipe(data.shards, tokenizer.to_str(), layout, data.min_chars, chats)


def source_names(data: DataSection) -> list[str]:
    """Names of the sources that are trained on, in order.

    Raises:
      InputError: there is none, or there are weights, but not one for each source.
    """
    names = _all_names(data)[: len(data.corpora) + len(data.files)]
    if not names:
        raise InputError(
            "data.corpora and data.files are empty: name some text to train on"
            + " besides data.eval" * bool(data.eval)
        )
    if data.weights and len(data.weights) != len(names):
        raise InputError(
            f"data.weights has {len(data.weights)} numbers for {len(names)} sources: expected one "
            "for each of data.corpora, then of data.files"
        )
    return names


def evaluation_names(data: DataSection) -> list[str]:
    """Names of the files that are only evaluated, in order."""
    return _all_names(data)[len(data.corpora) + len(data.files) :]


def _all_names(data: DataSection) -> list[str]:
    """Names of all sources, no two alike."""
    return source_labels(data.corpora, [*data.files, *data.eval])


def load_documents(data: DataSection, intake: Intake) -> list[Document]:
    """The corpus of a config without shards, as text in memory.

    Args:
      intake: counts what is skipped.

    Raises:
      InputError: as `load_corpus`; or there are weights.
    """
    if data.weights:
        raise InputError("data.weights needs data.shards: a directory for the corpus's tokens")
    return load_corpus(data.corpora, data.files, intake, data.eval)


def load_shards(
    data: DataSection,
    tokenizer: Tokenizer,
    layout: Layout,
    make: bool = True,
    chats: ChatFormat | None = None,
) -> Shards:
    """The shards of a config as a corpus; with `make`, missing shards are made first.

    Raises:
      InputError: as `make_shards` and `open_shards`.
    """
    recipe = recipe_of(data, tokenizer, layout, chats)
    if make:
        make_shards(data, recipe)
    return open_shards(
        data.shards, recipe, source_names(data), data.weights, evaluation_names(data)
    )


def make_shards(
    data: DataSection, recipe: Recipe, processes: int = 0, shard_bytes: int = SHARD_BYTES
) -> dict[str, Any]:
    """Makes the shards that are missing in `data.shards`; returns the manifest.

    If the manifest and all shards are there, no source is tokenized: sources that are here must be
    as they were. A line on stderr says which are not here.

    Args:
      processes: how many tokenize; 0: one for each core.

    Raises:
      InputError: a source cannot be read, or there is none; or one is not what it was when it was
        tokenized; or the directory holds another corpus or cannot be written.
    """
    source_names(data)  # what is wrong with them is said before any file is read
    home = Path(data.shards)
    try:
        (home / PARTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"data.shards={data.shards!r}: {error.strerror}") from None

    # The second of two runs that share data.shards is refused: both would write the same files.
    with locked(home, "data.shards"):
        if (home / MANIFEST).exists():
            with contextlib.suppress(DamagedError):  # what is damaged is made anew
                manifest = _read_manifest(home, data, recipe)
                _check_finished(home, data)
                return manifest
        # With the lock taken, no other run can still write these.
        for path in (*home.glob(".*.tmp"), *(home / PARTS).glob(".*.tmp")):
            path.unlink(missing_ok=True)  # left by a killed run
        try:
            return _make_missing(home, data, recipe, processes, shard_bytes)
        except OSError as error:
            raise cannot_write(home, error) from None


def _make_missing(
    home: Path, data: DataSection, recipe: Recipe, processes: int, shard_bytes: int
) -> dict[str, Any]:
    """The work of `make_shards`; the caller has locked the directory."""
    intake = Intake(strict=False)
    sources = _sources(data, intake)
    _note_sources(home, data, sources)
    tasks = []
    for number, files in enumerate(sources):
        tasks += [_Task(number, pieces) for pieces in _groups(files, shard_bytes)]
    if not tasks:
        raise nothing_to_read([*data.corpora, *data.files, *data.eval], data.min_chars)

    plan = _write_plan(home, data, recipe, sources, shard_bytes)
    _run_tasks(home, recipe, tasks, processes)
    check_sources(home, sources, _may_not_grow(data))  # nothing has changed meanwhile
    owners = [task.source for task in tasks]
    write_index(home, plan | {"skipped": intake.skipped}, owners)
    return _read_manifest(home, data, recipe)


def _read_manifest(home: Path, data: DataSection, recipe: Recipe) -> dict[str, Any]:
    return read_manifest(home, recipe, source_names(data), evaluation_names(data))


def _sources(data: DataSection, intake: Intake) -> list[list[TextPiece]]:
    """The files of each source, those that are only evaluated last."""
    return source_files(data.corpora, data.files, intake, data.eval)


def _check_finished(home: Path, data: DataSection) -> None:
    """Raises InputError if a source is not what the finished shards were made of."""
    sources = _sources(data, Intake(strict=False))
    unknown = check_sources(home, sources, _may_not_grow(data))
    if unknown:
        print(unknown, file=sys.stderr, flush=True)


def _note_sources(home: Path, data: DataSection, sources: Sequence[Sequence[TextPiece]]) -> None:
    """Notes what the sources are; if shards were begun here, they must be those of the shards."""
    if (home / PLAN).exists() and (home / SOURCES).exists():
        with contextlib.suppress(DamagedError):
            check_sources(home, sources, _may_not_grow(data))
            return
    record_sources(home, sources)


def _may_not_grow(data: DataSection) -> list[bool]:
    """For each source, whether a new file there is an error: corpora differ by machine."""
    return [False] * len(data.corpora) + [True] * len([*data.files, *data.eval])


def _write_plan(
    home: Path,
    data: DataSection,
    recipe: Recipe,
    sources: Sequence[Sequence[TextPiece]],
    shard_bytes: int,
) -> dict[str, Any]:
    """Writes plan.json and returns it; raises InputError if another plan was begun here."""
    described = []
    names = [*source_names(data), *evaluation_names(data)]
    for number, (name, files) in enumerate(zip(names, sources, strict=True)):
        about = {"name": name, "files": len(files), "sha256": _files_digest(files)}
        if number >= len(data.corpora) + len(data.files):
            about[EVALUATION] = True
        described.append(about)

    plan = recipe.identity() | {"sources": described, "shard_bytes": shard_bytes}
    path = home / PLAN
    # Finished shards are kept, so they must be those of this plan.
    if path.exists():
        require_identity(home, read_json(path), plan)
    write_text(path, json.dumps(plan, indent=1) + "\n")
    return plan


def _run_tasks(home: Path, recipe: Recipe, tasks: Sequence[_Task], processes: int) -> None:
    """Makes the shards that are not finished yet, with a progress bar."""
    sizes = [sum(piece.size for piece in task.pieces) for task in tasks]
    missing = [number for number in range(len(tasks)) if read_part(home, number) is None]
    done = sum(sizes) - sum(sizes[number] for number in missing)

    with ByteProgress("tokenizing", sum(sizes), done) as progress:
        arguments = [(number, tasks[number].pieces) for number in missing]
        make = functools.partial(make_shard, recipe)
        processes = min(processes or os.cpu_count() or 1, len(arguments))
        if processes > 1:
            run_in_processes(make, arguments, processes, progress.add)
        else:
            for number, pieces in arguments:
                make(number, pieces, progress.add)


def _groups(files: Sequence[TextPiece], size: int) -> Iterator[list[TextPiece]]:
    """The pieces of each shard: about `size` bytes together."""
    group: list[TextPiece] = []
    group_size = 0
    for file in files:
        for piece in cut(file, size):
            group.append(piece)
            group_size += piece.size
            if group_size >= size:
                yield group
                group = []
                group_size = 0
    if group:
        yield group


def _files_digest(files: Sequence[TextPiece]) -> str:
    """A digest of the files' names and sizes."""
    digest = hashlib.sha256()
    for file in files:
        size = 0 if is_on_hub(file.path) else os.path.getsize(file.path)
        digest.update(f"\0{file.name}\0{size}".encode())
    return digest.hexdigest()
