"""A limit on the compiled programs that a process keeps in memory."""

from __future__ import annotations

from pathlib import Path

import jax

from specjax._util.memory import return_memory

MAPS = Path("/proc/self/maps")
MAP_LIMIT = Path("/proc/sys/vm/max_map_count")
# Share of the limit at which programs are dropped. What is compiled next, a method or a test,
# needs less than the rest.
SHARE = 0.3


def make_room(share: float | None = None) -> bool:
    """Drops all compiled programs if they crowd the process; returns whether it did.

    On a CPU, XLA keeps some hundred memory maps for the loop of a method. Linux allows a process
    about 65,000. Beyond that, LLVM ends with "Cannot allocate memory". Dropped programs are
    loaded from the cache on disk, or compiled again. Systems other than Linux have no such limit.

    Args:
      share: the share of the limit at which programs are dropped, ``SHARE`` if not given. Their
        memory goes with them, some 0.2 MB for each map.
    """
    limit = SHARE if share is None else share
    if not MAPS.exists() or maps() < limit * int(MAP_LIMIT.read_text()):
        return False
    jax.clear_caches()
    return_memory()
    return True


def maps() -> int:
    """The number of memory maps of this process; reading a long list takes 20 ms."""
    return MAPS.read_bytes().count(b"\n")
