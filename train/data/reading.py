"""Files as streams of documents: text, JSON lines and Parquet, compressed or not.

No file is held in memory whole but one that is one document. A large file is read in pieces, each
of them alone; a document's name says where it stands, whatever the pieces.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from specjax._util.errors import InputError, SpecjaxError, foreign
from specjax._util.files import MOST_BYTES, open_file, open_parquet, parse_json, require_arrow

MIN_CHARS = 200  # shorter documents are package stubs and license headers
LONGEST_LINE = 1 << 28  # bytes of a document
TEXT_FIELDS = ("text", "content")
_HEAD = 1 << 10  # bytes of a file that show whether it is text
_PARQUET_ROWS = 256  # at once
_SHRINKS = 4  # a compressed file's text is about so much larger
_EXAMPLES = 3  # names that a reason is shown with

TEXT, LINES, PARQUET = "text", "lines", "parquet"


@dataclass(frozen=True)
class Document:
    """One text of the corpus; `name` is a posix path that is the same on every machine."""

    name: str
    text: str


@dataclass(frozen=True)
class TextPiece:
    """A part of a file that is read alone, from `begin` to before `end`; the whole by default.

    Attributes:
      path: where the file lies.
      name: of the file, on every machine the same.
      begin, end: bytes where JSON lines begin, or row groups of Parquet; None is the file's end.
      first: the number of its first line or row, from 1.
      size: bytes of text, about.
    """

    path: str
    name: str
    begin: int = 0
    end: int | None = None
    first: int = 1
    size: int = 0


@dataclass
class Intake:
    """What becomes a document, and a record of what does not.

    Attributes:
      strict: a bad record, or a damaged file, is an error, and not only recorded.
      longest: characters of a document; None takes any.
      skipped: reason → how many, and the names of a few.
    """

    strict: bool = True
    longest: int | None = None
    skipped: dict[str, dict[str, Any]] = field(default_factory=dict)

    def skip(self, reason: str, name: str) -> None:
        entry = self.skipped.setdefault(reason, {"count": 0, "examples": []})
        entry["count"] += 1
        if len(entry["examples"]) < _EXAMPLES:
            entry["examples"].append(name)

    def bad(self, message: str) -> None:
        """Raises InputError where this is strict."""
        if self.strict:
            raise InputError(message)
        self.skip("damaged", message)

    def merge(self, skipped: dict[str, dict[str, Any]]) -> None:
        """Adds what another one has recorded."""
        for reason, other in skipped.items():
            entry = self.skipped.setdefault(reason, {"count": 0, "examples": []})
            entry["count"] += other["count"]
            entry["examples"] = [*entry["examples"], *other["examples"]][:_EXAMPLES]

    def document(self, name: str, content: bytes | str) -> Iterator[Document]:
        """The document with LF line ends, or nothing where it is too short, or no text."""
        try:
            text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
            text.encode()  # JSON can smuggle in lone surrogates, which no tokenizer takes
        except UnicodeError:
            return self.skip("not UTF-8", name)
        text = text.replace("\r\n", "\n")
        if len(text) < MIN_CHARS:
            return self.skip(f"shorter than {MIN_CHARS} characters", name)
        if self.longest is not None and len(text) > self.longest:
            return self.skip(f"longer than {self.longest} characters", name)
        yield Document(name, text)


def kind_of(path: str | Path) -> str:
    """How a file holds documents: as one `TEXT`, as `LINES` of JSON, or as rows of `PARQUET`."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    packed = suffixes[-1:] in ([".gz"], [".zst"])
    kind = "".join(suffixes[-2:-1] if packed else suffixes[-1:])
    if kind in (".jsonl", ".ndjson") or (packed and kind == ".json"):
        return LINES
    return PARQUET if kind == ".parquet" else TEXT


def read_piece(piece: TextPiece, intake: Intake) -> Iterator[Document]:
    """The documents of a piece, one at a time.

    Raises:
      InputError: the file cannot be opened or read; or, of a strict intake, is damaged.
    """
    try:
        yield from _READERS[kind_of(piece.path)](piece, intake)
    except SpecjaxError as error:  # of what the file holds
        intake.bad(str(error))
    except OSError as error:
        raise unreadable(piece.path, error) from None


def unreadable(path: str | Path, error: OSError) -> InputError:
    """The error of a file that cannot be read."""
    return InputError(f"cannot read {error.filename or path}: {error.strerror}")


def cut(piece: TextPiece, size: int) -> Iterator[TextPiece]:
    """A whole file as pieces of about `size` bytes, as far as its format allows.

    Raises:
      InputError: it cannot be opened, or a Parquet file's footer is damaged.
    """
    try:
        there = Path(piece.path).stat().st_size
        kind, packed = kind_of(piece.path), Path(piece.path).suffix in (".gz", ".zst")
        if packed:
            require_arrow(piece.path, Path(piece.path).suffix == ".zst")
        if kind == PARQUET:
            yield from _cut_parquet(piece, size)
        elif kind == LINES and not packed and there > size:
            yield from _cut_lines(piece, size)
        else:
            yield replace(piece, size=there * (_SHRINKS if packed else 1))
    except OSError as error:
        raise unreadable(piece.path, error) from None


def _cut_lines(piece: TextPiece, size: int) -> Iterator[TextPiece]:
    """Each piece owns the lines that begin in it; lines are counted, which reads the file once."""
    with open_file(piece.path) as file:
        begin, first, number, border = 0, 1, 1, size
        while chunk := file.read(1 << 20):
            at, end = file.tell() - len(chunk), file.tell()
            while border < end:
                line_end = chunk.find(b"\n", max(0, border - at))
                if line_end < 0:
                    break
                here = number + chunk.count(b"\n", 0, line_end + 1)
                after = at + line_end + 1
                yield replace(piece, begin=begin, end=after, first=first, size=after - begin)
                begin, first = after, here
                border = begin + size
            number += chunk.count(b"\n")
        if file.tell() > begin:
            yield replace(piece, begin=begin, first=first, size=file.tell() - begin)


def _cut_parquet(piece: TextPiece, size: int) -> Iterator[TextPiece]:
    with _parquet(piece.path) as (file, _):
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    begin, first, rows, held = 0, 1, 0, 0
    for i, group in enumerate(groups, start=1):
        rows, held = rows + group.num_rows, held + group.total_byte_size
        if held >= size or i == len(groups):
            yield replace(piece, begin=begin, end=i, first=first, size=held)
            begin, first, held = i, 1 + rows, 0


def _read_text(piece: TextPiece, intake: Intake) -> Iterator[Document]:
    with _opened(piece.path) as file:
        content = file.read(_HEAD)
        if b"\0" in content:
            return intake.skip("binary", piece.name)
        content += file.read(MOST_BYTES)
    yield from intake.document(piece.name, content)


def _read_lines(piece: TextPiece, intake: Intake) -> Iterator[Document]:
    with _opened(piece.path) as file:
        if piece.begin:
            file.seek(piece.begin)
        at = piece.begin
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), piece.first):
            if len(line) == LONGEST_LINE:
                raise InputError(
                    f"{piece.path} line {number} has {LONGEST_LINE >> 20} MiB, or more"
                )
            if line.strip():
                yield from _read_record(piece, number, line, intake)
            at += len(line)
            if at == piece.end:
                return


def _read_record(piece: TextPiece, number: int, line: bytes, intake: Intake) -> Iterator[Document]:
    try:
        record = parse_json(line)
    except ValueError as error:
        return intake.bad(f"{piece.path} line {number} is {error}")
    values = map(record.get, TEXT_FIELDS) if isinstance(record, dict) else ()
    text = next((value for value in values if isinstance(value, str)), None)
    if text is None:
        return intake.bad(
            f"{piece.path} line {number}: expected an object with a string field "
            f"{' or '.join(TEXT_FIELDS)}, got {line[:60].decode(errors='replace')!r}"
        )
    yield from intake.document(f"{piece.name}#{number}", text)


def _read_parquet(piece: TextPiece, intake: Intake) -> Iterator[Document]:
    with _parquet(piece.path) as (file, column):
        end = file.metadata.num_row_groups if piece.end is None else piece.end
        groups = list(range(piece.begin, end))
        batches = file.iter_batches(_PARQUET_ROWS, row_groups=groups, columns=[column])
        row = piece.first
        while True:
            with foreign(f"{piece.path} is not a readable parquet file", InputError):
                batch = next(batches, None)
            if batch is None:
                return
            for number, text in enumerate(batch.column(0).to_pylist(), start=row):
                if isinstance(text, str):
                    yield from intake.document(f"{piece.name}#{number}", text)
                else:
                    said = f"column {column} holds {text!r}, no text"
                    intake.bad(f"{piece.path} row {number}: {said}")
            row += batch.num_rows


_READERS = {TEXT: _read_text, LINES: _read_lines, PARQUET: _read_parquet}


@contextlib.contextmanager
def _parquet(path: str) -> Iterator[tuple[Any, str]]:
    """The open file, and the column that holds its text; closed at the end."""
    with open_parquet(path) as file:
        columns = [name for name in TEXT_FIELDS if name in file.schema_arrow.names]
        if not columns:
            raise InputError(
                f"{path} has no column {' or '.join(TEXT_FIELDS)}: its columns are "
                f"{', '.join(file.schema_arrow.names)}"
            )
        yield file, columns[0]


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked where its suffix says that it is packed.

    Raises:
      InputError: it is packed, and damaged. Other errors of reading are OSError, as ever.
    """
    with open_file(path, pipes=True) as file:
        packing = Path(path).suffix.lower()
        if packing not in (".gz", ".zst"):
            yield file
            return
        try:
            with _unpacked(file, path, packing) as unpacked:
                yield unpacked
        except SpecjaxError:
            raise
        except (EOFError, zlib.error, OSError, ValueError) as error:
            if getattr(error, "errno", None):  # the system's, and not of what the file holds
                raise
            raise InputError(f"{path} is not a readable {packing} file ({error})") from None


def _unpacked(file: BinaryIO, path: str, packing: str) -> BinaryIO:
    if packing == ".gz":
        return gzip.GzipFile(fileobj=file)
    require_arrow(path)
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd"))
