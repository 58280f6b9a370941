"""Files as streams of documents: text, JSON lines and Parquet, compressed or not.

A document is a text, or a conversation that is tokenized already (:mod:`train.data.chats`).

Only a file that is a single document is read into memory whole. A large file is split into pieces
that can be read independently. A document's name is its line or row in the file, so it does not
depend on the pieces.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from specjax._util.errors import InputError, SpecjaxError, errors_as
from specjax._util.files import MOST_BYTES, open_file, open_parquet, parse_json, require_arrow
from train.data.chats import RECORD_KEYS, ChatFormat, ChatRow, has_answer
from train.data.hub import hub_records, is_on_hub
from train.data.tokenized import CUT

LONGEST_LINE = 1 << 28  # bytes
MIN_CHARS = 200  # shorter documents are often package stubs and license headers
TEXT_FIELDS = ("text", "content")
_HEAD = 1 << 10  # bytes of a file that show whether it is text
_PARQUET_ROWS = 256  # read at a time
_COMPRESSION = 4  # guess: a compressed file's text is about this many times larger
EXAMPLES = 3  # names that are kept for each reason to skip a document
_READ_BLOCK = 1 << 20  # bytes

TEXT = "text"
JSON = "json"
LINES = "lines"
PARQUET = "parquet"
HUB = "hub"
Numbered = tuple[int, Any]  # the number of a record in its file, from 1, and its value

# What is said of conversations, by reason.
ANSWERS_CUT_OFF = "answers all beyond data.seq_len"
NOTHING_TRAINED = "no token to train"
MOST_REASONS = 40  # a template's reasons may hold what a conversation says
OTHER_REASONS = "refused for other reasons"
NEEDS_TOKENIZER = "conversations, which need tokenizer.path or model.init_from"
UNKNOWN_RECORD = (
    "a record of no known form: expected text, content, messages, conversations, prompt and "
    "completion, instruction and output, or input_ids and loss_mask"
)


@dataclass(frozen=True)
class Document:
    """One text of the corpus.

    Attributes:
      name: a posix path that is the same on every machine.
      text: its text.
      source: the name of the corpus or file that it belongs to.
      held_out: whether it is evaluated instead of trained on; None: its name decides.
      ids, mask: of a conversation: its tokens, and which of them are trained. None: the text is
        still to be tokenized, and all of it is trained.
    """

    name: str
    text: str
    source: str = ""
    held_out: bool | None = None
    ids: np.ndarray | None = field(default=None, compare=False)
    mask: np.ndarray | None = field(default=None, compare=False)


@dataclass(frozen=True)
class TextPiece:
    """A part of a file, from `begin` to before `end`; by default the whole file.

    Attributes:
      path: where the file lies.
      name: the file's name, the same on every machine.
      begin, end: byte offsets of JSON lines, or Parquet row groups; None: the file's end.
      first: the number of its first line or row, from 1.
      size: bytes of text, estimated.
      held_out: as of its documents.
    """

    path: str
    name: str
    begin: int = 0
    end: int | None = None
    first: int = 1
    size: int = 0
    held_out: bool | None = None


@dataclass
class Intake:
    """Decides which texts become documents, and counts those that are skipped.

    Attributes:
      strict: a bad record or a damaged file is an error; otherwise it is skipped and counted.
      shortest: the least characters of a document.
      longest: the most characters of a document; None: no limit.
      chats: turns conversations into tokens; None: they are skipped.
      skipped: reason → the count, and a few names as examples.
    """

    strict: bool = True
    shortest: int = MIN_CHARS
    longest: int | None = None
    chats: ChatFormat | None = None
    skipped: dict[str, dict[str, Any]] = field(default_factory=dict)

    def skip(self, reason: str, name: str) -> None:
        """Counts a skipped document; the first few names of each reason are kept."""
        entry = self.skipped.setdefault(reason, {"count": 0, "examples": []})
        entry["count"] += 1
        if len(entry["examples"]) < EXAMPLES:
            entry["examples"].append(name)

    def bad(self, message: str) -> None:
        """Counts a bad record; raises InputError if `strict`."""
        if self.strict:
            raise InputError(message)
        self.skip("damaged", message)

    def merge(self, skipped: dict[str, dict[str, Any]]) -> None:
        """Adds the counts of another `Intake`."""
        for reason, other in skipped.items():
            entry = self.skipped.setdefault(reason, {"count": 0, "examples": []})
            entry["count"] += other["count"]
            if "refused" in other:
                entry["refused"] = other["refused"]
            entry["examples"] = [*entry["examples"], *other["examples"]][:EXAMPLES]

    def refuse(self, reason: str, name: str) -> None:
        """Counts a record that cannot be used; a file of such records alone is an error."""
        if reason not in self.skipped and len(self.skipped) >= MOST_REASONS:
            reason = OTHER_REASONS
        self.skip(reason, name)
        self.skipped[reason]["refused"] = True

    def conversation(self, name: str, record: dict[str, Any]) -> list[Document] | None:
        """The documents of a record; None if it is no conversation.

        Raises:
          ValueError: it is a wrong one, or the template refuses it.
        """
        if self.chats is None:
            return None
        rows = self.chats.rows(record)
        if rows is None:
            return None
        return list(self._of_rows(name, rows, self.chats))

    def _of_rows(self, name: str, rows: list[ChatRow], chats: ChatFormat) -> Iterator[Document]:
        for row in rows:
            cut = chats.cut(row)
            if not has_answer(row):
                self.skip(NOTHING_TRAINED, name)
            elif not has_answer(cut):
                self.skip(ANSWERS_CUT_OFF, name)
            else:
                if len(cut.ids) < len(row.ids):
                    self.skip(CUT, name)
                yield Document(name, row.text, ids=cut.ids, mask=cut.mask)

    def document(self, name: str, content: bytes | str) -> Iterator[Document]:
        """Yields the document with LF line ends; nothing if it is too short, or not text."""
        try:
            text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
            text.encode()  # JSON can hold lone surrogates, which tokenizers refuse
        except UnicodeError:
            return self.skip("not UTF-8", name)
        text = text.replace("\r\n", "\n")
        if len(text) < self.shortest:
            return self.skip(f"shorter than {self.shortest} characters", name)
        if self.longest is not None and len(text) > self.longest:
            return self.skip(f"longer than {self.longest} characters", name)
        yield Document(name, text)


def kind_of(path: str | Path) -> str:
    """The file's format: one `TEXT`, `LINES` of JSON, any `JSON`, or rows of `PARQUET`."""
    if is_on_hub(path):
        return HUB
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    compressed = suffixes[-1:] in ([".gz"], [".zst"])
    if compressed:
        suffixes.pop()
    kind = suffixes[-1] if suffixes else ""
    # Compressed .json is lines in most datasets, such as C4, and may be too large to be one value.
    if kind in (".jsonl", ".ndjson") or (compressed and kind == ".json"):
        return LINES
    if kind == ".json":
        return JSON
    if kind == ".parquet":
        return PARQUET
    return TEXT


def read_piece(piece: TextPiece, intake: Intake) -> Iterator[Document]:
    """The documents of a piece, one at a time.

    Raises:
      InputError: the file cannot be opened or read; or it is damaged and the intake is strict.
    """
    good = 0
    before = {reason: entry["count"] for reason, entry in intake.skipped.items()}
    try:
        for document in _documents(piece, intake):
            good += 1
            yield replace(document, held_out=piece.held_out)
    except SpecjaxError as error:  # the content is damaged
        if is_on_hub(piece.path):  # the network, which may be there again
            raise
        intake.bad(str(error))
    except OSError as error:
        raise unreadable(piece.path, error) from None
    if not good and piece.first == 1 and piece.end is None:
        _require_good(piece, intake, before)


def _documents(piece: TextPiece, intake: Intake) -> Iterator[Document]:
    if kind_of(piece.path) == TEXT:
        yield from _read_text(piece, intake)
        return
    for number, record in records(piece, intake):
        yield from _record_documents(piece, number, record, intake)


def records(piece: TextPiece, intake: Intake) -> Iterator[Numbered]:
    """The number and the value of each record of a piece, one at a time.

    Raises:
      InputError: it is a plain text; or it is damaged.
      OSError: it cannot be read.
    """
    kind = kind_of(piece.path)
    if kind == TEXT:
        raise InputError(f"{piece.path}: expected records, as in .jsonl, .json or .parquet")
    yield from _RECORDS[kind](piece, intake)


def _require_good(piece: TextPiece, intake: Intake, before: dict[str, int]) -> None:
    """Raises InputError if no record of a whole file was good, and one was refused.

    Args:
      before: the counts of the intake before the file.
    """
    for reason, entry in intake.skipped.items():
        if entry.get("refused") and entry["count"] > before.get(reason, 0):
            count = entry["count"] - before.get(reason, 0)
            raise InputError(
                f"{piece.path}: no record is good; {count} of them: {reason} (such as "
                f"{entry['examples'][-1]})"
            )


def unreadable(path: str | Path, error: OSError) -> InputError:
    """The error of a file that cannot be read."""
    return InputError(f"cannot read {error.filename or path}: {error.strerror}")


def cut(piece: TextPiece, size: int) -> Iterator[TextPiece]:
    """Splits a whole file into pieces of about `size` bytes, as far as its format allows.

    Raises:
      InputError: the file cannot be opened, or a Parquet file's footer is damaged.
    """
    if is_on_hub(piece.path):
        yield piece  # streamed in one piece, of unknown size
        return
    path = Path(piece.path)
    try:
        file_size = path.stat().st_size
        kind = kind_of(path)
        suffix = path.suffix.lower()
        compressed = suffix in (".gz", ".zst")
        if compressed:
            require_arrow(piece.path, suffix == ".zst")
        if kind == PARQUET:
            yield from _cut_parquet(piece, size)
        elif compressed:
            yield replace(piece, size=file_size * _COMPRESSION)
        elif kind == LINES and file_size > size:
            yield from _cut_lines(piece, size)
        else:
            yield replace(piece, size=file_size)
    except OSError as error:
        raise unreadable(piece.path, error) from None


def _cut_lines(piece: TextPiece, size: int) -> Iterator[TextPiece]:
    """Pieces that end at the first line break after `size` bytes.

    The file is read once, to count the lines: their numbers are the documents' names.
    """
    begin = 0  # of the piece, in bytes
    first = 1  # the number of its first line
    line = 1  # the number of the line in which the block begins
    with open_file(piece.path) as file:
        while block := file.read(_READ_BLOCK):
            block_end = file.tell()
            block_begin = block_end - len(block)
            while begin + size < block_end:
                line_end = block.find(b"\n", max(0, begin + size - block_begin))
                if line_end < 0:
                    break  # the line goes on in the next block
                end = block_begin + line_end + 1
                yield replace(piece, begin=begin, end=end, first=first, size=end - begin)
                begin = end
                first = line + block.count(b"\n", 0, line_end + 1)
            line += block.count(b"\n")

        if file.tell() > begin:
            yield replace(piece, begin=begin, first=first, size=file.tell() - begin)


def _cut_parquet(piece: TextPiece, size: int) -> Iterator[TextPiece]:
    with _parquet(piece.path) as (file, _):
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    begin = 0
    first = 1
    rows = 0
    piece_size = 0
    for end, group in enumerate(groups, start=1):
        rows += group.num_rows
        piece_size += group.total_byte_size
        if piece_size >= size or end == len(groups):
            yield replace(piece, begin=begin, end=end, first=first, size=piece_size)
            begin = end
            first = 1 + rows
            piece_size = 0


def _read_text(piece: TextPiece, intake: Intake) -> Iterator[Document]:
    with _opened(piece.path) as file:
        content = file.read(_HEAD)
        # Text has no zero bytes; this tells before a large binary file is read whole.
        if b"\0" in content:
            return intake.skip("binary", piece.name)
        content += file.read(MOST_BYTES)
    yield from intake.document(piece.name, content)


def _read_json(piece: TextPiece, intake: Intake) -> Iterator[Numbered]:
    """Records of a .json file: an array of them, a single one, or one a line."""
    with _opened(piece.path) as file:
        content = file.read(MOST_BYTES).removeprefix(codecs.BOM_UTF8)
    try:
        value = parse_json(content)
    except ValueError:
        for number, line in enumerate(content.split(b"\n"), 1):
            if line.strip():
                yield from _read_record(piece, number, line, intake)
        return
    yield from enumerate(value if isinstance(value, list) else [value], 1)


def _read_lines(piece: TextPiece, intake: Intake) -> Iterator[Numbered]:
    with _opened(piece.path) as file:
        if piece.begin:
            file.seek(piece.begin)
        place = piece.begin
        # readline with a limit: a file without line breaks must not fill the memory.
        lines = iter(lambda: file.readline(LONGEST_LINE), b"")
        for number, line in enumerate(lines, piece.first):
            if len(line) == LONGEST_LINE:
                raise InputError(
                    f"{piece.path} line {number} has {LONGEST_LINE >> 20} MiB, or more"
                )
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if text.strip():
                yield from _read_record(piece, number, text, intake)
            place += len(line)
            if place == piece.end:
                return


def _read_record(piece: TextPiece, number: int, line: bytes, intake: Intake) -> Iterator[Numbered]:
    try:
        record = parse_json(line)
    except ValueError as error:
        return intake.bad(f"{piece.path} line {number} is {error}")
    yield number, record


def _record_documents(
    piece: TextPiece, number: int, record: Any, intake: Intake
) -> Iterator[Document]:
    """The documents of a record: a text, or the rows of a conversation."""
    name = f"{piece.name}#{number}"
    try:
        rows = intake.conversation(name, record) if isinstance(record, dict) else None
    except ValueError as error:
        return intake.refuse(str(error), name)
    if rows is not None:
        yield from rows
        return
    text = _text_of(record)
    if text is None:
        start = json.dumps(record, ensure_ascii=False, default=str)[:60]
        reason = UNKNOWN_RECORD
        if intake.chats is None and isinstance(record, dict) and set(RECORD_KEYS) & set(record):
            reason = NEEDS_TOKENIZER
        return intake.refuse(reason, f"{name}: {start}")
    yield from intake.document(name, text)


def _text_of(record: Any) -> str | None:
    """The first field of `TEXT_FIELDS` that holds a text."""
    if not isinstance(record, dict):
        return None
    for name in TEXT_FIELDS:
        if isinstance(record.get(name), str):
            return record[name]
    return None


def _read_parquet(piece: TextPiece, intake: Intake) -> Iterator[Numbered]:
    with _parquet(piece.path) as (file, columns):
        end = piece.end
        if end is None:
            end = file.metadata.num_row_groups
        groups = list(range(piece.begin, end))
        # Few columns and rows at a time: row groups may be large.
        batches = file.iter_batches(_PARQUET_ROWS, row_groups=groups, columns=columns)
        row = piece.first
        while True:
            with errors_as(f"{piece.path} is not a readable parquet file", InputError):
                batch = next(batches, None)
            if batch is None:
                return
            yield from enumerate(batch.to_pylist(), start=row)
            row += batch.num_rows


def _read_hub(piece: TextPiece, intake: Intake) -> Iterator[Numbered]:
    yield from enumerate(hub_records(piece.path), start=1)


_RECORDS = {
    JSON: _read_json,
    LINES: _read_lines,
    PARQUET: _read_parquet,
    HUB: _read_hub,
}


@contextlib.contextmanager
def _parquet(path: str) -> Iterator[tuple[Any, list[str]]]:
    """The open file, and the names of the columns that hold texts or conversations."""
    with open_parquet(path) as file:
        names = file.schema_arrow.names
        columns = [name for name in (*TEXT_FIELDS, *RECORD_KEYS) if name in names]
        if not columns:
            raise InputError(
                f"{path} has no column {', '.join((*TEXT_FIELDS, *RECORD_KEYS))}: its columns are "
                f"{', '.join(names)}"
            )
        yield file, columns


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed if its suffix is .gz or .zst.

    Raises:
      InputError: it is compressed and damaged. Other errors of reading stay OSError.
    """
    with open_file(path, pipes=True) as file:
        suffix = Path(path).suffix.lower()
        if suffix not in (".gz", ".zst"):
            yield file
            return
        try:
            with _decompressed(file, path, suffix) as decompressed:
                yield decompressed
        except SpecjaxError:
            raise
        except (EOFError, zlib.error, OSError, ValueError) as error:
            if getattr(error, "errno", None):  # the system's error, not one of the content
                raise
            raise InputError(f"{path} is not a readable {suffix} file ({error})") from None


def _decompressed(file: BinaryIO, path: str, suffix: str) -> BinaryIO:
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    require_arrow(path)
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd"))
