"""What the C library keeps of freed memory, and how to make it give that back.

Loading a checkpoint, compiling a program and tokenizing a long text each free much memory that
glibc keeps for later requests. Other C libraries have no such functions; nothing happens there.
"""

from __future__ import annotations

import ctypes

_ARENA_MAX = -8  # of glibc's mallopt


def return_memory() -> None:
    """Gives freed memory back to the system."""
    _call("malloc_trim", 0)


def limit_heaps(count: int) -> None:
    """Lets all threads share ``count`` heaps; to be called before other threads start.

    By default glibc makes eight heaps per processor core. What the threads of one heap have freed,
    those of others do not use.
    """
    _call("mallopt", _ARENA_MAX, count)


def _call(name: str, *arguments: int) -> None:
    """Calls a function of glibc; does nothing with another C library."""
    try:
        getattr(ctypes.CDLL(None), name)(*arguments)
    except (AttributeError, OSError, TypeError):
        return
