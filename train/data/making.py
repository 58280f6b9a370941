"""Making the shards of a corpus in several processes; what a killed run has finished stays."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from specjax._util.errors import InputError, SpecjaxError
from specjax._util.files import locked, write_text
from train.config import DataSection
from train.data.corpus import load_corpus, nothing_to_read, source_files
from train.data.packing import Layout
from train.data.progress import Bytes
from train.data.reading import Document, Intake, TextPiece, cut
from train.data.shards import (
    MANIFEST,
    PARTS,
    PLAN,
    DamagedError,
    Recipe,
    Shards,
    make_shard,
    open_shards,
    read_json,
    read_manifest,
    read_part,
    require_identity,
    unwritable,
    write_index,
)

SHARD_BYTES = 1 << 27  # of text that a shard is made of, about

Tell = Callable[[int], None]


def recipe_of(data: DataSection, tokenizer: Tokenizer, layout: Layout) -> Recipe:
    """What makes the shards of a config."""
    return Recipe(data.shards, tokenizer.to_str(), layout)


def source_names(data: DataSection) -> list[str]:
    """Of the sources, in order; of files without the folders above them.

    Raises:
      InputError: there are weights, and not one for each.
    """
    names = [*data.corpora, *[Path(file).resolve().name for file in data.files]]
    if data.weights and len(data.weights) != len(names):
        raise InputError(
            f"data.weights has {len(data.weights)} numbers for {len(names)} sources: expected one "
            "for each of data.corpora, then of data.files"
        )
    return names


def own_documents(data: DataSection) -> list[Document]:
    """The corpus of a config that asks for no shards.

    Raises:
      InputError: as `load_corpus`; or there are weights.
    """
    if data.weights:
        raise InputError("data.weights needs data.shards: a directory for the corpus's tokens")
    return load_corpus(data.corpora, data.files)


def own_shards(
    data: DataSection, tokenizer: Tokenizer, layout: Layout, make: bool = True
) -> Shards:
    """The shards of a config as a corpus; what is missing of them is made first.

    Raises:
      InputError: as `make_shards` and `open_shards`.
    """
    recipe = recipe_of(data, tokenizer, layout)
    if make:
        make_shards(data, recipe)
    return open_shards(data.shards, recipe, source_names(data), data.weights)


def make_shards(
    data: DataSection, recipe: Recipe, processes: int = 0, shard_bytes: int = SHARD_BYTES
) -> dict[str, Any]:
    """Makes what is missing of `data.shards`; returns the manifest.

    Where the manifest and all shards are there nothing else is read.

    Args:
      processes: that tokenize; 0: one for each core.

    Raises:
      InputError: a source that cannot be read, or none; a directory of another corpus, or one that
        cannot be written.
    """
    home = Path(data.shards)
    try:
        (home / PARTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"data.shards={data.shards!r}: {error.strerror}") from None
    with locked(home, "data.shards"):
        if (home / MANIFEST).exists():
            try:
                return read_manifest(home, recipe, source_names(data))
            except DamagedError:
                pass  # what is missing is made anew
        for path in (*home.glob(".*.tmp"), *(home / PARTS).glob(".*.tmp")):
            path.unlink(missing_ok=True)  # of a killed run
        try:
            return _make(home, data, recipe, processes, shard_bytes)
        except OSError as error:
            raise unwritable(home, error) from None


def _make(
    home: Path, data: DataSection, recipe: Recipe, processes: int, shard_bytes: int
) -> dict[str, Any]:
    """The work itself; the directory is ours alone."""
    intake = Intake(strict=False)
    sources = source_files(data.corpora, data.files, intake)
    tasks = [(i, group) for i, files in enumerate(sources) for group in _groups(files, shard_bytes)]
    if not tasks:
        raise nothing_to_read([*data.corpora, *data.files])
    named = [
        {"name": name, "files": len(files), "sha256": _digest(files)}
        for name, files in zip(source_names(data), sources, strict=True)
    ]
    plan = recipe.identity() | {"sources": named, "shard_bytes": shard_bytes}
    if (home / PLAN).exists():
        require_identity(home, read_json(home / PLAN), plan)
    write_text(home / PLAN, json.dumps(plan, indent=1) + "\n")
    todo = [number for number in range(len(tasks)) if read_part(home, number) is None]
    sizes = [sum(piece.size for piece in pieces) for _, pieces in tasks]
    done = sum(sizes) - sum(sizes[number] for number in todo)
    with Bytes("tokenizing", sum(sizes), done) as progress:
        work = [(number, tasks[number][1]) for number in todo]
        make = functools.partial(make_shard, recipe)
        processes = min(processes or os.cpu_count() or 1, len(work))
        if processes > 1:
            in_processes(make, work, processes, progress.add)
        else:
            for arguments in work:
                make(*arguments, progress.add)
    write_index(home, plan | {"skipped": intake.skipped}, [source for source, _ in tasks])
    return read_manifest(home, recipe, source_names(data))


def _groups(files: Sequence[TextPiece], size: int) -> Iterator[list[TextPiece]]:
    """What each shard is made of: pieces of about `size` bytes in all."""
    group: list[TextPiece] = []
    held = 0
    for piece in (piece for file in files for piece in cut(file, size)):
        group.append(piece)
        held += piece.size
        if held >= size:
            yield group
            group, held = [], 0
    if group:
        yield group


def _digest(files: Sequence[TextPiece]) -> str:
    """Of the files' names and sizes."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"\0{file.name}\0{os.path.getsize(file.path)}".encode())
    return digest.hexdigest()


def in_processes(
    work: Callable[..., None], arguments: Sequence[tuple], count: int, tell: Tell
) -> None:
    """Calls `work(*arguments, tell)` for each, in `count` processes, which end with this one.

    Raises:
      InputError: what one of them raises, or that one was killed; the others are ended.
    """
    context = multiprocessing.get_context("spawn")  # threads of ours may hold any lock
    waiting, started, idle = list(reversed(arguments)), {}, []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(work, theirs), daemon=True)
            process.start()
            theirs.close()
            started[ours] = process
            idle.append(ours)
        while waiting or len(idle) < count:
            while waiting and idle:
                idle.pop().send(waiting.pop())
            for ours in wait([pipe for pipe in started if pipe not in idle]):
                answer = ours.recv()
                if isinstance(answer, str):
                    raise InputError(answer)
                if answer is None:
                    idle.append(ours)
                else:
                    tell(answer)
    except (EOFError, ConnectionError):
        raise InputError(
            "a process that tokenizes was killed, perhaps for want of memory: the same command "
            "goes on, with fewer --processes if it happens again"
        ) from None
    finally:
        for process in started.values():
            process.terminate()
            process.join()


def _work(work: Callable[..., None], pipe: Connection) -> None:
    """One process: does what it is sent and says how far it is, a text where it fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears it and ends this one
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is one process for each core
    try:
        while True:
            work(*pipe.recv(), pipe.send)
            pipe.send(None)
    except SpecjaxError as error:
        with contextlib.suppress(OSError):
            pipe.send(str(error))
    except (EOFError, OSError):
        return  # the first process is gone
