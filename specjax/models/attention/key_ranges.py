"""What each query sees as two ranges of places, and the blocks of keys that this leaves to visit.

A *place* is an index in the row or in the cache, as opposed to a position in the document. In a
packed row a token sees its document up to itself. In a prefill chunk it sees the cache up to its
position. A token of one of SDSAT's windows sees two ranges: its document before the window's start,
and the window up to itself.

Axis legend: B rows, N queries, S keys, A tokens of windows, I blocks of queries, J blocks of keys.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.models.attention.dense import (
    PADDING_SEGMENT,
    Causal,
    Isolated,
    MaskFn,
    Meta,
    window_limit,
)

RANGES = 2
NOWHERE = (1 << 30, 0)  # begin and end of an empty range, which widens no range of a block


class KeyRanges(NamedTuple):
    """A query sees the places ``begin`` to before ``end`` of each of its ranges."""

    begin: Int[Array, "B 2 N"]
    end: Int[Array, "B 2 N"]


class Visits(NamedTuple):
    """The blocks that each block visits: ``order[b, i, :count[b, i]]``."""

    order: Int[Array, "B I J"]
    count: Int[Array, "B I"]


def supports_ranges(mask: MaskFn) -> bool:
    """Whether :func:`mask_ranges` knows what this mask lets queries see."""
    return type(mask) in (Causal, Isolated)


def mask_ranges(mask: Causal, meta: Meta) -> KeyRanges:
    """The ranges of all tokens of packed rows. Padding sees nothing.

    Args:
      mask: one that :func:`supports_ranges`.
      meta: what ``mask`` reads, ``[B, N]`` each. The tokens of a segment are neighbors, and their
        positions rise by one.
    """
    clean = mask.clean if isinstance(mask, Isolated) else meta["position"].shape[1]
    head = {name: x[:, :clean] for name, x in meta.items()}
    begin, end = _clean_range(mask, head)
    none = jnp.full_like(begin, NOWHERE[0]), jnp.full_like(end, NOWHERE[1])
    ranges = KeyRanges(jnp.stack([begin, none[0]], 1), jnp.stack([end, none[1]], 1))
    if not isinstance(mask, Isolated):
        return ranges
    return jax.tree.map(
        lambda x, y: jnp.concatenate([x, y], axis=2), ranges, _window_ranges(mask, meta)
    )


def chain_ranges(positions: Int[Array, "B N"], window: int | None) -> KeyRanges:
    """The ranges of a chain in a cache where each token is at the place of its position."""
    begin = jnp.zeros_like(positions)
    if window is not None:
        begin = jnp.maximum(positions - window + 1, 0)
    nothing = jnp.full_like(begin, NOWHERE[0]), jnp.full_like(begin, NOWHERE[1])
    return KeyRanges(
        jnp.stack([begin, nothing[0]], axis=1), jnp.stack([positions + 1, nothing[1]], axis=1)
    )


def visits_of(ranges: KeyRanges, keys: int, block: int, wide: int) -> tuple[Visits, Visits]:
    """The blocks of keys of each block of queries, and the blocks of queries of each one of keys.

    A block's range goes from the first begin to the last end of its queries. So a visited block
    may have no key that a query sees; the mask of its scores says so.

    Args:
      ranges: of N queries, a multiple of ``block``.
      keys: S, a multiple of ``wide``.
      block: queries of a block.
      wide: keys of a block.
    """
    rows = len(ranges.begin)
    first = ranges.begin.reshape(rows, RANGES, -1, block).min(3)[..., None]
    last = ranges.end.reshape(rows, RANGES, -1, block).max(3)[..., None]
    low = jnp.arange(keys // wide, dtype=jnp.int32) * wide
    visited = jnp.any((first < low + wide) & (last > low), axis=1)
    return _list_visited(visited), _list_visited(visited.transpose(0, 2, 1))


def document_starts(meta: Meta, clean: int) -> Int[Array, "B A"]:
    """The place of position 0 of the document of each token after the ``clean`` ones.

    Segments are at most as many as clean tokens.
    """
    segments = meta["segment"]
    places = jnp.arange(clean, dtype=jnp.int32)
    # Indexed by segment, of which there are at most as many as clean tokens. All tokens of a
    # segment write the same value, place - position.
    starts = jnp.zeros((len(segments), clean + 1), jnp.int32)
    rows = jnp.arange(len(segments))[:, None]
    starts = starts.at[rows, segments[:, :clean]].set(
        places - meta["position"][:, :clean], mode="drop"
    )
    return jnp.take_along_axis(starts, segments[:, clean:], axis=1)


def _clean_range(mask: Causal, meta: Meta) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    """The one range of each token that is not of a window: its document up to itself."""
    segments = meta["segment"]
    place = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    changes = segments[:, 1:] != segments[:, :-1]
    changes = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)
    begin = jax.lax.cummax(jnp.where(changes, place, 0), axis=1)
    begin = jnp.maximum(begin, place - _reach(mask, meta) + 1)
    return _real_range(begin, place + 1, segments != PADDING_SEGMENT)


def _window_ranges(mask: Isolated, meta: Meta) -> KeyRanges:
    """Both ranges of the tokens of windows ``[B, 2, A]``."""
    clean = mask.clean
    tail = {name: x[:, clean:] for name, x in meta.items()}
    position = tail["position"]
    is_real = (tail["windows"] > 0) & (tail["segment"] != PADDING_SEGMENT)
    reach = _reach(mask, tail)
    zero = document_starts(meta, clean)
    document = _real_range(
        jnp.maximum(zero, zero + position - reach + 1),
        zero + tail["starts"],
        is_real,
    )
    place = clean + jnp.arange(position.shape[1], dtype=jnp.int32)
    index = jnp.minimum(position - tail["starts"], reach - 1)
    window = _real_range(place - index, jnp.broadcast_to(place + 1, position.shape), is_real)
    begin, end = (jnp.stack(pair, axis=1) for pair in zip(document, window, strict=True))
    return KeyRanges(begin, end)


def _reach(mask: Causal, meta: Meta) -> Int[Array, "B N"]:
    """How many positions each token sees at most, its own included."""
    position = meta["position"]
    if mask.window is None:
        return jnp.full_like(position, NOWHERE[0])
    limit = window_limit(position, mask.window, mask.chunked)
    if isinstance(limit, int):
        return jnp.full_like(position, limit)
    return limit[..., 0]


def _real_range(
    begin: Int[Array, "B N"], end: Int[Array, "B N"], is_real: Bool[Array, "B N"]
) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    """The range, empty where ``is_real`` is false or ``end`` is not after ``begin``."""
    is_real = is_real & (begin < end)
    return jnp.where(is_real, begin, NOWHERE[0]), jnp.where(is_real, end, NOWHERE[1])


def _list_visited(visited: Bool[Array, "B I J"]) -> Visits:
    """The indices of the true entries, in order. What follows them is meaningless."""
    number = jnp.cumsum(visited, axis=2, dtype=jnp.int32)
    step = jnp.arange(visited.shape[2], dtype=jnp.int32)[:, None]
    # The entry with `step` true ones before it comes after all that count no more.
    order = jnp.sum(number[:, :, None, :] <= step, axis=3, dtype=jnp.int32)
    return Visits(order, number[:, :, -1])
