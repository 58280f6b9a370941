"""Training text: sources of the standard library, of packages or of specjax; the user's files.

Every source yields `Document`s with a stable name. The name alone decides whether a document is
held out. So the split stays the same when the corpus is reordered, grows, or changes its text.
"""

import collections
import dataclasses
import hashlib
import importlib.metadata
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

import specjax
from specjax._util.errors import InputError
from train.data.hub import is_on_hub
from train.data.reading import Document, Intake, TextPiece, read_piece, unreadable

HELD_OUT_ONE_IN = 20  # gives a few hundred held-out functions of the standard library
MAX_INSTALLED_BYTES = 200_000  # larger sources of packages are nearly always generated
COPY = "copies of another document"  # why a document is left out
MOST_IN_MEMORY = 1 << 31  # characters of text
# Data that programs read, not text that people wrote; skipped below a folder.
DATA_SUFFIXES = frozenset({".json", ".csv", ".tsv", ".lock", ".log", ".map", ".svg", ".ipynb"})

# Test suites are repetitive, and tables teach nothing about code.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "testing", "__pycache__"}
)
_STDLIB_TABLES = ("lib2to3/", "encodings/", "pydoc_data/", "html/entities.py", "_sysconfigdata")
_VENDORED = frozenset({"_vendor", "vendor", "vendored", "_vendored", "third_party", "_distutils"})

_PERMISSIVE = re.compile(
    r"\b(MIT|BSD|0BSD|Apache|PSF\w*|Python Software Foundation|ISC|Zlib|Unlicense|CC0|BSL-1\.0"
    r"|CNRI-Python|Boost|HPND|AFL)\b",
    re.IGNORECASE,
)
_RESTRICTED = re.compile(r"GPL|MPL|EPL|CDDL|Mozilla|Proprietary|Commercial|EULA", re.IGNORECASE)


def is_held_out(name: str) -> bool:
    """Whether a document is never trained on: true for one name in `HELD_OUT_ONE_IN`."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def is_evaluated(document: Document) -> bool:
    """Whether a document is held out: because its source is, or else by its name."""
    return is_held_out(document.name) if document.held_out is None else document.held_out


def load_corpus(
    names: Sequence[str],
    files: Sequence[str] = (),
    intake: Intake | None = None,
    evaluation: Sequence[str] = (),
) -> list[Document]:
    """Documents of the named corpora and of `files`, sorted by name, without exact duplicates.

    Args:
      names: any of `"stdlib"`, `"installed"` and `"specjax"`.
      files: text files, folders of text, JSON lines and Parquet files of texts or conversations,
        which may be compressed (.gz, .zst), and data sets of the hub (`hf:NAME[:SPLIT]`).
      intake: decides what is skipped, and counts it; by default a bad record is an error.
      evaluation: files and folders like `files` that are held out. Then nothing else is.

    Raises:
      InputError: an unknown corpus, an unreadable file, a bad line, or no document at all.
    """
    intake = intake or Intake()
    pieces = source_files(names, files, intake, evaluation)
    labels = source_labels(names, [*files, *evaluation])
    documents = _read_sources(labels, pieces, intake)
    kept = _without_duplicates(_within_memory(documents), intake)
    if not kept:
        raise nothing_to_read([*names, *files, *evaluation], intake.shortest)
    return kept


def _read_sources(
    labels: Sequence[str], sources: Sequence[Sequence[TextPiece]], intake: Intake
) -> Iterator[Document]:
    """The documents of all sources, each with its source's label."""
    for label, pieces in zip(labels, sources, strict=True):
        for piece in pieces:
            for document in read_piece(piece, intake):
                yield dataclasses.replace(document, source=label)


def source_labels(names: Sequence[str], files: Sequence[str]) -> list[str]:
    """The names of the sources, in order: corpora, then files.

    A file's name stands without its folder. Where another source has that name, too, it stands with
    as many folders as tell them apart.
    """
    paths = [file if is_on_hub(file) else os.path.abspath(file) for file in files]
    taken = collections.Counter(names)
    for path in set(paths):  # a file that is named twice is one source
        taken.update(_endings(path))
    labels = list(names)
    for path in paths:
        labels.append(next((ending for ending in _endings(path) if taken[ending] == 1), path))
    return labels


def _endings(path: str) -> list[str]:
    """A file's name, then with one folder, with two, and so on; of a data set only its name."""
    if is_on_hub(path):
        return [path]
    parts = Path(path).parts
    return ["/".join(parts[-count:]) for count in range(1, len(parts))]


def _within_memory(documents: Iterable[Document]) -> Iterator[Document]:
    """The documents; raises InputError once they have more than `MOST_IN_MEMORY` characters."""
    chars = 0
    for document in documents:
        chars += len(document.text)
        if chars > MOST_IN_MEMORY:
            raise InputError(
                f"the corpus has more than {MOST_IN_MEMORY >> 20} MiB of text, too much for "
                "memory: set data.shards to a directory for its tokens"
            )
        yield document


def stdlib_root() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files() -> list[tuple[str, Path]]:
    """(document name, path) of every standard-library source that belongs to the corpus."""
    root = stdlib_root()
    names = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    return sorted(
        (f"stdlib/{name}", path)
        for name, path in names.items()
        if _SKIPPED_FOLDERS.isdisjoint(name.split("/")) and not name.startswith(_STDLIB_TABLES)
    )


def permissive_distributions() -> dict[str, str]:
    """Installed distributions whose metadata states a permissive license: name → license."""
    return {name: license for name, license, _ in _permissive()}


def _permissive() -> list[tuple[str, str, importlib.metadata.Distribution]]:
    """(name, license, distribution), once per name, sorted by name."""
    by_name = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        license = _stated_licence(distribution.metadata)
        if name and name != "specjax" and _is_permissive(license):
            # The first entry on sys.path is the one that Python imports.
            by_name.setdefault(name, (name, license, distribution))
    return [by_name[name] for name in sorted(by_name)]


def _stated_licence(metadata) -> str:
    """The license as the distribution states it: SPDX expression, classifiers, or free text."""
    classifiers = [
        line.rsplit("::", 1)[-1].strip()
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License ::") and line.count("::") > 1
    ]
    free_text = (metadata.get("License") or "").strip().splitlines() or [""]
    return metadata.get("License-Expression") or " AND ".join(classifiers) or free_text[0].strip()


def _is_permissive(license: str) -> bool:
    """Whether any choice of an OR is permissive and names no restrictive license."""
    return any(
        _PERMISSIVE.search(choice) and not _RESTRICTED.search(choice)
        for choice in re.split(r"\bOR\b", license)
    )


def _installed_files() -> Iterator[tuple[str, Path]]:
    for name, _, distribution in _permissive():
        for file in distribution.files or []:
            if _is_installed_source(PurePosixPath(file.as_posix())):
                path = Path(distribution.locate_file(file))
                # A RECORD may list files that were removed by hand.
                if path.is_file() and path.stat().st_size <= MAX_INSTALLED_BYTES:
                    yield f"{name}/{file.as_posix()}", path


def _is_installed_source(path: PurePosixPath) -> bool:
    """Whether a package's file is hand-written source code, not a test or generated."""
    skipped = _SKIPPED_FOLDERS | _VENDORED | {".."}
    tests_or_generated = ("test_*", "conftest*", "*_test.py", "*_pb2.py")
    return (
        path.suffix == ".py"
        and skipped.isdisjoint(path.parts)
        and not any(path.match(pattern) for pattern in tests_or_generated)
    )


def _own_files() -> list[tuple[str, Path]]:
    """The sources of specjax's library: a corpus for trials that every installation has."""
    root = Path(specjax.__file__).parent
    return [(f"specjax/{path.relative_to(root).as_posix()}", path) for path in root.rglob("*.py")]


_CORPORA = {"stdlib": stdlib_files, "installed": _installed_files, "specjax": _own_files}


def source_files(
    names: Sequence[str], files: Sequence[str], intake: Intake, evaluation: Sequence[str] = ()
) -> list[list[TextPiece]]:
    """The files of each source: corpora first, then files and folders, in the order given.

    Last come the files and folders of `evaluation`. If there are any, all of them are held out and
    nothing else is.

    Below a folder, hidden files and data (`DATA_SUFFIXES`) are skipped and counted. Files that are
    not text are skipped later, when they are read.

    Raises:
      InputError: an unknown corpus, or a folder that cannot be listed.
    """
    for name in names:
        if name not in _CORPORA:
            known = ", ".join(sorted(_CORPORA))
            raise InputError(f"unknown corpus {name!r}: expected one of {known}, or a file")
    sources = []
    for corpus in names:
        sources.append([TextPiece(str(path), name) for name, path in _CORPORA[corpus]()])
    for file in files:
        sources.append(list(_files_below(file, intake)))
    if not evaluation:
        return sources

    sources = [_with_split(pieces, held_out=False) for pieces in sources]
    for file in evaluation:
        pieces = list(_files_below(file, intake))
        sources.append(_with_split(pieces, held_out=True))
    return sources


def _with_split(pieces: Sequence[TextPiece], held_out: bool) -> list[TextPiece]:
    return [dataclasses.replace(piece, held_out=held_out) for piece in pieces]


def _files_below(file: str, intake: Intake) -> Iterator[TextPiece]:
    """A file or a data set itself, or the files below a folder, sorted by name.

    Links to files are read, links to folders are not: they may lead in a circle.
    """
    if is_on_hub(file):
        yield TextPiece(file, file)
        return
    root = Path(file)
    try:
        if not root.is_dir():
            yield TextPiece(str(root), root.name)
            return
        for path in sorted(_entries_below(root)):
            name = path.relative_to(root.parent).as_posix()
            if any(part.startswith(".") for part in path.relative_to(root).parts):
                intake.skip("hidden", name)
            elif path.is_dir():
                intake.skip("links to folders", name)
            elif not path.is_file():
                intake.skip("not a file", name)
            elif path.suffix.lower() in DATA_SUFFIXES:
                intake.skip("data", name)
            else:
                yield TextPiece(str(path), name)
    except OSError as error:
        raise unreadable(root, error) from None


def _entries_below(root: Path) -> Iterator[Path]:
    """Files and links below a folder. Raises OSError if a folder cannot be listed."""

    def fail(error: OSError) -> None:
        raise error

    # Path.rglob would leave out what it may not list.
    for folder, folders, files in os.walk(root, onerror=fail):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in (*links, *files):
            yield Path(folder, name)


def nothing_to_read(sources: Sequence[str], shortest: int) -> InputError:
    """The error of a corpus without any document of at least ``shortest`` characters."""
    return InputError(
        f"the corpus is empty: expected UTF-8 text of at least {shortest} characters "
        f"(data.min_chars) in {', '.join(sources) or 'some source, but none is given'}"
    )


def _without_duplicates(documents: Iterable[Document], intake: Intake) -> list[Document]:
    """One document per text, sorted by name; of equal texts a held-out one stays.

    Otherwise a package that vendors a held-out file would put it into the training set.
    """
    kept: dict[bytes, Document] = {}
    for document in sorted(documents, key=lambda d: (not is_evaluated(d), d.name)):
        first = kept.setdefault(hashlib.sha256(document.text.encode()).digest(), document)
        if first is not document:
            intake.skip(COPY, document.name)
    return sorted(kept.values(), key=lambda d: d.name)
