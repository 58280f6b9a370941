"""Training text: the running interpreter's library, installed packages, or the user's files.

Every source yields `Document`s with a stable name; the name alone decides whether a document
is held out, so the split survives re-ordering, growth of the corpus and a change of its text.
"""

import hashlib
import importlib.metadata
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from specjax.errors import InputError
from specjax.files import open_file, open_parquet, parse_json, read_file

HELD_OUT_ONE_IN = 20  # leaves a few hundred functions of the standard library to measure on
MIN_CHARS = 200  # shorter documents are package stubs and licence headers
MAX_INSTALLED_BYTES = 200_000  # above this an installed source is nearly always generated
LONGEST_LINE = 1 << 28  # bytes of a document
TEXT_FIELDS = ("text", "content")
TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".pyi", ".jsonl", ".parquet"})

# Test suites repeat themselves, and tables teach nothing about code.
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


@dataclass(frozen=True)
class Document:
    """One text of the corpus; `name` is a posix path that is the same on every machine."""

    name: str
    text: str


def is_held_out(name: str) -> bool:
    """True for the documents that no model trains on: one name in `HELD_OUT_ONE_IN`."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def load_corpus(names: Sequence[str], files: Sequence[str] = ()) -> list[Document]:
    """Documents of the named corpora and of `files`, sorted by name, without exact duplicates.

    Args:
      names: any of `"stdlib"` and `"installed"`.
      files: text files, folders of text, `.jsonl` and `.parquet` files with a column `text`
        or `content`.

    Raises:
      InputError: an unknown corpus, an unreadable file, a bad line, or nothing at all to read.
    """
    documents: list[Document] = []
    for name in names:
        if name not in _CORPORA:
            known = ", ".join(sorted(_CORPORA))
            raise InputError(f"unknown corpus {name!r}: expected one of {known}, or a file")
        documents.extend(_CORPORA[name]())
    for file in files:
        documents.extend(_read_path(Path(file)))
    documents = _without_duplicates(documents)
    if not documents:
        raise InputError(
            f"the corpus is empty: expected UTF-8 text of at least {MIN_CHARS} characters in "
            f"{', '.join([*names, *files]) or 'some source, but none is given'}"
        )
    return documents


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
    """Installed distributions whose metadata states a permissive licence: name → licence."""
    return {name: licence for name, licence, _ in _permissive()}


def _permissive() -> list[tuple[str, str, importlib.metadata.Distribution]]:
    """(name, licence, distribution), once per name, sorted by name."""
    by_name = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        licence = _stated_licence(distribution.metadata)
        if name and name != "specjax" and _is_permissive(licence):
            # The first entry on sys.path is the one that Python imports.
            by_name.setdefault(name, (name, licence, distribution))
    return [by_name[name] for name in sorted(by_name)]


def _stated_licence(metadata) -> str:
    """Licence as the distribution states it: SPDX expression, else classifiers, else free text."""
    classifiers = [
        line.rsplit("::", 1)[-1].strip()
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License ::") and line.count("::") > 1
    ]
    free_text = (metadata.get("License") or "").strip().splitlines() or [""]
    return metadata.get("License-Expression") or " AND ".join(classifiers) or free_text[0].strip()


def _is_permissive(licence: str) -> bool:
    """Every alternative that applies together must be permissive; one of an OR is enough."""
    return any(
        _PERMISSIVE.search(choice) and not _RESTRICTED.search(choice)
        for choice in re.split(r"\bOR\b", licence)
    )


def _stdlib() -> Iterator[Document]:
    for name, path in stdlib_files():
        yield from _document(name, path.read_bytes())


def _installed() -> Iterator[Document]:
    for name, _, distribution in _permissive():
        for file in distribution.files or []:
            if _is_installed_source(PurePosixPath(file.as_posix())):
                path = Path(distribution.locate_file(file))
                # A RECORD may list files that were removed by hand.
                if path.is_file() and path.stat().st_size <= MAX_INSTALLED_BYTES:
                    yield from _document(f"{name}/{file.as_posix()}", path.read_bytes())


def _is_installed_source(path: PurePosixPath) -> bool:
    """Whether a package's file is source that people wrote to be run."""
    skipped = _SKIPPED_FOLDERS | _VENDORED | {".."}
    tests_or_generated = ("test_*", "conftest*", "*_test.py", "*_pb2.py")
    return (
        path.suffix == ".py"
        and skipped.isdisjoint(path.parts)
        and not any(path.match(pattern) for pattern in tests_or_generated)
    )


_CORPORA = {"stdlib": _stdlib, "installed": _installed}


def _read_path(path: Path) -> Iterator[Document]:
    """Documents of one file, or of every text file below a folder."""
    try:
        if not path.is_dir():
            yield from _read_file(path, path.name)
            return
        for file in sorted(path.rglob("*")):
            if file.is_file() and file.suffix in TEXT_SUFFIXES:
                yield from _read_file(file, file.relative_to(path.parent).as_posix())
    except OSError as error:
        raise InputError(f"cannot read {error.filename or path}: {error.strerror}") from None


def _read_file(path: Path, name: str) -> Iterator[Document]:
    if path.suffix == ".jsonl":
        yield from _read_jsonl(path, name)
    elif path.suffix == ".parquet":
        yield from _read_parquet(path, name)
    else:
        yield from _document(name, read_file(path, pipes=True))


def _read_jsonl(path: Path, name: str) -> Iterator[Document]:
    with open_file(path, pipes=True) as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE), b""), start=1):
            if len(line) == LONGEST_LINE:
                raise InputError(f"{path} line {number} has {LONGEST_LINE >> 20} MiB, or more")
            if not line.strip():
                continue
            try:
                record = parse_json(line)
            except ValueError as error:
                raise InputError(f"{path} line {number} is {error}") from None
            values = map(record.get, TEXT_FIELDS) if isinstance(record, dict) else ()
            text = next((value for value in values if isinstance(value, str)), None)
            if text is None:
                raise InputError(
                    f"{path} line {number}: expected an object with a string field "
                    f"{' or '.join(TEXT_FIELDS)}, got {line[:60].decode(errors='replace')!r}"
                )
            yield from _document(f"{name}#{number}", text)


def _read_parquet(path: Path, name: str) -> Iterator[Document]:
    file = open_parquet(path)
    columns = [field for field in TEXT_FIELDS if field in file.schema_arrow.names]
    if not columns:
        raise InputError(
            f"{path} has no column {' or '.join(TEXT_FIELDS)}: its columns are "
            f"{', '.join(file.schema_arrow.names)}"
        )
    batches = file.iter_batches(columns=columns[:1])
    texts = (text for batch in batches for text in batch.column(0).to_pylist())
    for row, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise InputError(f"{path} row {row}: column {columns[0]} holds {text!r}, no text")
        yield from _document(f"{name}#{row}", text)


def _document(name: str, content: bytes | str) -> Iterator[Document]:
    """The document with LF line ends, or nothing where it is too short or not UTF-8."""
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        text.encode()  # JSON can smuggle in lone surrogates, which no tokenizer takes
    except UnicodeError:
        return
    text = text.replace("\r\n", "\n")
    if len(text) >= MIN_CHARS:
        yield Document(name, text)


def _without_duplicates(documents: Iterable[Document]) -> list[Document]:
    """One document per text, sorted by name; a held-out copy wins over one that would be trained.

    Otherwise a package that vendors a held-out file would put it into the training set.
    """
    kept: dict[bytes, Document] = {}
    for document in sorted(documents, key=lambda d: (not is_held_out(d.name), d.name)):
        kept.setdefault(hashlib.sha256(document.text.encode()).digest(), document)
    return sorted(kept.values(), key=lambda d: d.name)
