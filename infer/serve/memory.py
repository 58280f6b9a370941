"""Bounds the memory that a server's process keeps but does not use.

Programs are traced and compiled in many threads, and texts tokenized in others. Each compilation
takes 300 MB for a moment, and each text of 1 MB takes several.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from specjax._util.memory import limit_heaps, return_memory

HEAPS = 2
SECONDS = 1.0  # between two looks at the memory
GROWTH = 2**26  # bytes; giving back more at once would stop threads for longer
REGULARLY = 10.0  # seconds until memory is given back although the process has not grown
STATM = "/proc/self/statm"


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Lets all threads share two heaps; in the block, freed memory is given back now and then.

    To be entered before other threads start. After the block nothing is given back any more: that
    takes long in a process with much memory, and all its threads wait.
    """
    limit_heaps(HEAPS)
    ended = threading.Event()
    if os.path.exists(STATM):
        threading.Thread(target=_watch, args=(ended,), name="memory", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(ended: threading.Event) -> None:
    """Gives freed memory back when the process has grown, and regularly."""
    low = resident()
    last = time.monotonic()
    while not ended.wait(SECONDS):
        if resident() > low + GROWTH or time.monotonic() > last + REGULARLY:
            return_memory()
            low = resident()
            last = time.monotonic()


def resident() -> int:
    """Bytes of this process in memory, from Linux's ``/proc``."""
    with open(STATM) as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
