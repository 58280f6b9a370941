"""The server's log, which clients must not be able to fill.

The text format has errors only. As JSON it has one object a line, and a line for each completion
and each answer, for those who collect logs. No line has texts, keys or addresses of clients.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

LOG = logging.getLogger("infer.serve")
REQUESTS = logging.getLogger("infer.serve.requests")  # not limited
FORMATS = ("text", "json")
LOGGERS = ("infer.serve", "uvicorn.error", "asyncio")
RECORDS = 20  # in a period; a traceback is one record
PERIOD = 60.0  # seconds


class Limit(logging.Filter):
    """Lets ``RECORDS`` records of a period pass; the last of them says that others are left out."""

    def __init__(self):
        super().__init__()
        self._lock = threading.Lock()
        self._began = 0.0
        self._passed = 0

    def filter(self, record: logging.LogRecord) -> bool:
        with self._lock:
            now = time.monotonic()
            if now - self._began >= PERIOD:
                self._began = now
                self._passed = 0
            self._passed += 1
            passed = self._passed
        if passed == RECORDS:
            record.msg = f"{record.getMessage()} (no more messages for up to {PERIOD:g} s)"
            record.args = ()
        return passed <= RECORDS


def limit_log() -> None:
    """Limits what the server and the libraries below it write to stderr."""
    limit = Limit()
    for name in LOGGERS:
        logging.getLogger(name).addFilter(limit)


@contextlib.contextmanager
def log_format(name: str) -> Iterator[None]:
    """Writes the log in one of ``FORMATS`` while the block runs.

    As JSON, whatever else is printed on stderr becomes the message of a line, too.
    """
    if name == "text":
        yield
        return
    stream = sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonFormatter())
    REQUESTS.setLevel(logging.INFO)
    logging.getLogger().addHandler(handler)
    sys.stderr = _JsonLines(stream)
    try:
        yield
    finally:
        sys.stderr = stream
        logging.getLogger().removeHandler(handler)
        REQUESTS.setLevel(logging.NOTSET)


def log_request(event: str, **fields: Any) -> None:
    """A line of the JSON log; as text there is none."""
    REQUESTS.info(event, extra={"fields": fields})


class _JsonFormatter(logging.Formatter):
    """A record as one JSON object: time (UTC), level, logger, message, and its fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = _line(record.created, record.levelname.lower(), record.name, record.getMessage())
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _JsonLines(io.TextIOBase):
    """A stream that writes each line it gets as the message of a JSON object."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._begun = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            for line in filter(None, lines):
                print(json.dumps(_line(time.time(), "info", "stderr", line)), file=self._stream)
            self._stream.flush()
        return len(text)

    def fileno(self) -> int:
        return self._stream.fileno()


def _line(seconds: float, level: str, logger: str, message: str) -> dict[str, Any]:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    stamp = f"{whole}.{int(seconds * 1000) % 1000:03d}Z"
    return {"time": stamp, "level": level, "logger": logger, "message": message}
