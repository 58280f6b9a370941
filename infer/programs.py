"""How many compiled programs a process may hold."""

from __future__ import annotations

from pathlib import Path

import jax

MAPS, MOST = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
SHARE = 0.3  # whatever is compiled next, a method or a test, takes less than the rest


def make_room() -> bool:
    """Drops all compiled programs where they crowd the process; returns whether it did.

    XLA keeps some hundred memory maps for a method's loop on a CPU, Linux allows a process about
    65,000, and beyond them LLVM dies of "Cannot allocate memory". Programs are loaded from the
    cache on disk, or compiled, when they are run again. Without Linux there is nothing to count.
    """
    if not MAPS.exists() or maps() < SHARE * int(MOST.read_text()):
        return False
    jax.clear_caches()
    return True


def maps() -> int:
    """Memory maps of this process; reading a long list takes 20 ms."""
    return MAPS.read_bytes().count(b"\n")
