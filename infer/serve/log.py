"""The server's log, which clients must not be able to fill."""

from __future__ import annotations

import logging
import threading
import time

LOG = logging.getLogger("infer.serve")
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
