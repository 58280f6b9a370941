"""Counters of methods without drafts."""

from __future__ import annotations

from jaxtyping import Array, Int

from specjax.types import DecodeState, Stats


def count_targets(
    state: DecodeState,
    emitted: Int[Array, "B"],
    calls: Int[Array, "B"] | int,
    passes: Int[Array, ""] | int,
) -> Stats:
    """The counters after a round of ``calls`` target calls per live row and no draft."""
    live = (~state.done).astype(emitted.dtype)
    stats = state.stats
    return stats.replace(
        target_calls=stats.target_calls + live * calls,
        rounds=stats.rounds + live,
        emitted=stats.emitted + emitted,
        passes=stats.passes + passes,
    )
