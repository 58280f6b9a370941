"""``execution:DIR``: whether a query gives what the gold query gives (Yu et al. 2018, Spider).

DIR is the dataset's ``database/``: one folder per ``db_id`` with the SQLite file of that name. What
a model wrote is confined by SQLite itself: the file is opened for reading alone, nothing but SELECT
is let through (no ATTACH, no PRAGMA), and time, rows, the length of a value and memory are bounded.
"""

from __future__ import annotations

import contextlib
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

SECONDS, MOST_ROWS, MOST_COLUMNS = 10.0, 100_000, 64
LONGEST_VALUE, LONGEST_QUERY, MEMORY = 1 << 20, 1 << 16, 1 << 29  # bytes
STEPS = 10_000  # of SQLite's machine between looks at the clock
# Comparing columns in any order could take as many tries as there are orders.
MOST_TRIES = 10_000
ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
FENCE = re.compile(r"```(?:sql|sqlite)?\s*\n?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
BEGUN = re.compile(r"\bselect\s*\Z", re.IGNORECASE)
ORDERED = re.compile(r"\border\s+by\b", re.IGNORECASE)

Rows = list[tuple[Any, ...]]


class Execution(PerCompletion):
    """1 where the completion's query has the gold query's rows.

    In their order where the gold query says ORDER BY, else as a bag; columns may be in any order,
    as in the evaluation by test suites (Zhong et al. 2020). A query that fails, is not one SELECT
    or passes a bound counts 0.
    """

    columns = {"execution": "execution"}  # noqa: RUF012

    def __init__(self, directory: str):
        self._home = Path(directory).expanduser()
        self._gold: dict[tuple[str, str], Rows] = {}
        if not self._home.is_dir():
            raise OptionError(f"--metric execution: {directory} is no directory of databases")

    def check(self, prompts: Sequence[Completion]) -> None:
        for number, prompt in enumerate(prompts, 1):
            for key in ("db_id", "query"):
                if not isinstance(prompt.task.get(key), str):
                    raise OptionError(f"--metric execution: prompt {number} has no text at {key!r}")
            try:
                self._expected(prompt.task)
            except sqlite3.Error as error:
                raise OptionError(
                    f"--metric execution: prompt {number}: the gold query fails in "
                    f"{self._file(prompt.task)} ({error})"
                ) from None

    def scores(self, done: Sequence[Completion]) -> list[list[float]]:
        return [[float(self._is_right(one))] for one in done]

    def _is_right(self, one: Completion) -> bool:
        try:
            rows = run_query(self._file(one.task), query_of(one))
        except sqlite3.Error:
            return False
        return same_rows(self._expected(one.task), rows, bool(ORDERED.search(one.task["query"])))

    def _expected(self, task: Task) -> Rows:
        key = task["db_id"], task["query"]
        if key not in self._gold:
            self._gold[key] = run_query(self._file(task), task["query"])
        return self._gold[key]

    def _file(self, task: Task) -> Path:
        name = task["db_id"]
        path = self._home / name / f"{name}.sqlite"
        if not re.fullmatch(r"\w[\w.-]*", name) or not path.is_file():
            raise OptionError(f"--metric execution: there is no database {path}")
        return path


def query_of(one: Completion) -> str:
    """The query of a completion: in a fence, or up to a semicolon or an empty line.

    It goes on with a SELECT that ends the prompt.
    """
    fenced = FENCE.search(one.text)
    text = fenced[1] if fenced else one.text
    text = re.split(r";|\n\s*\n", text.strip(), maxsplit=1)[0]
    begun = BEGUN.search(one.prompt) and not re.match(r"\s*(select|with)\b", text, re.IGNORECASE)
    return f"SELECT {text}" if begun else text


def run_query(path: Path, query: str) -> Rows:
    """The rows of one SELECT, within the bounds above.

    Raises:
      sqlite3.Error: the query fails, may not run, or passes a bound.
    """
    if len(query) > LONGEST_QUERY or "\0" in query or not query.strip():
        raise sqlite3.DataError("no query of a length in reason")
    with _opened(path) as database, contextlib.closing(database.cursor()) as cursor:
        rows = cursor.execute(query).fetchmany(MOST_ROWS + 1)
    if len(rows) > MOST_ROWS:
        raise sqlite3.DataError(f"more than {MOST_ROWS} rows")
    return rows


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    # Immutable: nothing is locked, and no journal beside the file is read or written.
    place = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(place, uri=True)) as database:
        database.text_factory = lambda text: text.decode(errors="replace")
        database.execute("PRAGMA temp_store = MEMORY")
        database.execute(f"PRAGMA hard_heap_limit = {MEMORY}")  # of SQLite in this process
        for limit, most in (
            (sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE),
            (sqlite3.SQLITE_LIMIT_COLUMN, MOST_COLUMNS * 8),
            (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
        ):
            database.setlimit(limit, most)
        database.set_authorizer(
            lambda action, *_: sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY
        )
        deadline = time.monotonic() + SECONDS
        database.set_progress_handler(lambda: time.monotonic() > deadline, STEPS)
        yield database


def same_rows(gold: Rows, rows: Rows, ordered: bool) -> bool:
    """Whether both hold the same rows, under some order of the columns."""
    if len(gold) != len(rows) or (gold and len(gold[0]) != len(rows[0])):
        return False
    if not gold:
        return True
    wanted = gold if ordered else Counter(gold)
    for order, _ in zip(_orders(gold, rows), range(MOST_TRIES), strict=False):
        moved = [tuple(row[i] for i in order) for row in rows]
        if (moved if ordered else Counter(moved)) == wanted:
            return True
    return False


def _orders(gold: Rows, rows: Rows) -> Iterator[tuple[int, ...]]:
    """Orders of the columns in which each holds the values of the gold column."""
    theirs = [Counter(column) for column in zip(*rows, strict=True)]
    alike = [
        [i for i, values in enumerate(theirs) if values == Counter(column)]
        for column in zip(*gold, strict=True)
    ]

    def beyond(taken: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(taken) == len(alike):
            yield taken
            return
        for i in alike[len(taken)]:
            if i not in taken:
                yield from beyond((*taken, i))

    return beyond(())


def make(argument: str, settings: Settings) -> Execution:
    """The metric; ``argument`` is the directory of databases."""
    return Execution(argument)
