"""``execution:DIR``: whether a query returns what the gold query returns (Yu et al. 2018, Spider).

DIR is the dataset's ``database/``: one folder per ``db_id`` with the SQLite file of that name.
SQLite itself confines what a model wrote. The file is opened read-only, and only SELECT is allowed
(no ATTACH, no PRAGMA). Time, rows, the length of a value and memory are limited.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from infer.bench.metrics.protocol import Completion, PerCompletion, Task
from infer.bench.metrics.settings import Settings
from specjax._util.errors import OptionError
from specjax._util.files import expand_user

SECONDS = 10.0
STEPS = 10_000  # of SQLite's virtual machine between two checks of the clock
MAX_ROWS = 100_000
MAX_COLUMNS = 512
MAX_VALUE = 1 << 20  # bytes
MAX_QUERY = 1 << 16  # characters
MEMORY = 1 << 29  # bytes
# Columns may match in any order, and there may be too many orders to try them all.
MAX_ORDERS = 10_000
ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
FENCE = re.compile(r"```(?:sqlite3?|sql)?\s*\n?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
ENDS_IN_SELECT = re.compile(r"\bselect\s*\Z", re.IGNORECASE)
BEGINS_A_QUERY = re.compile(r"\s*(select|with)\b", re.IGNORECASE)
ORDERED = re.compile(r"\border\s+by\b", re.IGNORECASE)

Rows = list[tuple[Any, ...]]


class Execution(PerCompletion):
    """1 if the completion's query returns the gold query's rows, else 0.

    Rows are compared in order if the gold query has ORDER BY, else as a multiset. Columns may be in
    any order, as in the evaluation by test suites (Zhong et al. 2020). A query that fails, is not a
    single SELECT, or exceeds a limit counts 0.
    """

    columns = {"execution": "execution"}  # noqa: RUF012

    def __init__(self, directory: str):
        self._directory = expand_user(directory)
        self._gold: dict[tuple[str, str], Rows] = {}
        if not os.path.isdir(self._directory):
            raise OptionError(f"--metric execution: {directory} is no directory of databases")

    def check(self, prompts: Sequence[Completion]) -> None:
        for number, prompt in enumerate(prompts, 1):
            for key in ("db_id", "query"):
                if not isinstance(prompt.task.get(key), str):
                    raise OptionError(f"--metric execution: prompt {number} has no text at {key!r}")
            try:
                self._gold_rows(prompt.task)
            except sqlite3.Error as error:
                raise OptionError(
                    f"--metric execution: prompt {number}: the gold query fails in "
                    f"{self._file(prompt.task)} ({error})"
                ) from None

    def scores(self, completions: Sequence[Completion]) -> list[list[float]]:
        return [[float(self._is_right(one))] for one in completions]

    def _is_right(self, one: Completion) -> bool:
        try:
            rows = run_query(self._file(one.task), query_of(one))
        except sqlite3.Error:
            return False
        ordered = ORDERED.search(one.task["query"]) is not None
        return same_rows(self._gold_rows(one.task), rows, ordered)

    def _gold_rows(self, task: Task) -> Rows:
        """The gold query's rows; each query runs once."""
        key = (task["db_id"], task["query"])
        if key not in self._gold:
            self._gold[key] = run_query(self._file(task), task["query"])
        return self._gold[key]

    def _file(self, task: Task) -> Path:
        name = task["db_id"]
        path = self._directory / name / f"{name}.sqlite"
        # The name must not lead out of the directory.
        if not re.fullmatch(r"\w[\w.-]*", name) or not path.is_file():
            raise OptionError(f"--metric execution: there is no database {path}")
        return path


def query_of(one: Completion) -> str:
    """The query of a completion: inside a code fence, or up to a semicolon or an empty line.

    If the prompt ends in SELECT, the query continues it.
    """
    fenced = FENCE.search(one.text)
    text = fenced[1] if fenced else one.text
    text = re.split(r";|\n\s*\n", text.strip(), maxsplit=1)[0]
    if ENDS_IN_SELECT.search(one.prompt) and not BEGINS_A_QUERY.match(text):
        return f"SELECT {text}"
    return text


def run_query(path: Path, query: str) -> Rows:
    """The rows of one SELECT, within the limits above.

    Raises:
      sqlite3.Error: the query fails, is not allowed, or exceeds a limit.
    """
    if len(query) > MAX_QUERY or "\0" in query or not query.strip():
        raise sqlite3.DataError(f"expected a query of 1 to {MAX_QUERY} characters, without NUL")
    with _opened(path) as database, contextlib.closing(database.cursor()) as cursor:
        rows = cursor.execute(query).fetchmany(MAX_ROWS + 1)
    if len(rows) > MAX_ROWS:
        raise sqlite3.DataError(f"more than {MAX_ROWS} rows")
    return rows


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """The database, read-only, with all limits set."""
    # Immutable: SQLite takes no locks, and neither reads nor writes a journal beside the file.
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
        database.text_factory = lambda text: text.decode(errors="replace")
        database.execute("PRAGMA temp_store = MEMORY")
        database.execute(f"PRAGMA hard_heap_limit = {MEMORY}")  # of SQLite in this whole process
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE)
        database.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, MAX_COLUMNS)
        database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        # After the PRAGMAs above, which it denies.
        database.set_authorizer(
            lambda action, *_: sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY
        )
        deadline = time.monotonic() + SECONDS
        database.set_progress_handler(lambda: time.monotonic() > deadline, STEPS)
        yield database


def same_rows(gold: Rows, rows: Rows, ordered: bool) -> bool:
    """Whether both have the same rows, under some order of the columns."""
    if len(gold) != len(rows) or (gold and len(gold[0]) != len(rows[0])):
        return False
    if not gold:
        return True
    expected = gold if ordered else Counter(gold)
    for order, _ in zip(_column_orders(gold, rows), range(MAX_ORDERS), strict=False):
        reordered = [tuple(row[i] for i in order) for row in rows]
        if (reordered if ordered else Counter(reordered)) == expected:
            return True
    return False


def _column_orders(gold: Rows, rows: Rows) -> Iterator[tuple[int, ...]]:
    """The orders of the columns in which each has the same values as its gold column."""
    counted = [Counter(column) for column in zip(*rows, strict=True)]
    candidates = []  # for each gold column, the columns with the same values
    for gold_column in zip(*gold, strict=True):
        expected = Counter(gold_column)
        candidates.append([i for i, values in enumerate(counted) if values == expected])

    def extend(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == len(candidates):
            yield order
            return
        for i in candidates[len(order)]:
            if i not in order:
                yield from extend((*order, i))

    return extend(())


def make(argument: str, settings: Settings) -> Execution:
    """The metric; ``argument`` is the directory of databases."""
    return Execution(argument)
