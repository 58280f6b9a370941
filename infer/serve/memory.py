"""What the C library keeps of freed memory: without limits, more than a server needs itself.

Programs are traced and compiled in many threads, and texts tokenized in others. Each compilation
takes 300 MB for a moment, and each text of 1 MB takes several.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time

M_ARENA_MAX = -8  # of glibc's mallopt
ARENAS = 2
SECONDS = 1.0  # between two looks at the memory
GROWTH = 2**26  # bytes; giving back more at once would stop threads for longer
REGULARLY = 10.0  # seconds until memory is given back although the process has not grown
STATM = "/proc/self/statm"


def limit_memory() -> None:
    """Lets all threads share two heaps, and gives freed memory back from time to time.

    To be called before other threads start. By default glibc makes eight heaps per processor core.
    What the threads of one heap have freed, those of others do not use.
    """
    _call("mallopt", M_ARENA_MAX, ARENAS)
    if os.path.exists(STATM):
        threading.Thread(target=_watch, name="memory", daemon=True).start()


def return_memory() -> None:
    """Gives freed memory back to the system; glibc keeps what a compilation took."""
    _call("malloc_trim", 0)


def _watch() -> None:
    """Gives freed memory back when the process has grown, and regularly."""
    low = _resident()
    last = time.monotonic()
    while True:
        time.sleep(SECONDS)
        if _resident() > low + GROWTH or time.monotonic() > last + REGULARLY:
            return_memory()
            low = _resident()
            last = time.monotonic()


def _resident() -> int:
    """Bytes of the process in memory."""
    with open(STATM) as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _call(name: str, *arguments: int) -> None:
    """Calls a function of glibc; does nothing with another C library."""
    try:
        getattr(ctypes.CDLL(None), name)(*arguments)
    except (AttributeError, OSError, TypeError):
        return
