"""The KV cache: its buffers, their sizes, writes, and the commit of an accepted path.

Layers of a sliding window keep their keys and values in a ring buffer: the token at position p is
in cache position ``p % size``. All other layers have one cache position per token position.

Axis legend: B rows, N new tokens, S cache positions, L layers, K key heads, E head size, D draft
depth.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from specjax._util.platform import platform
from specjax.models.config import ModelConfig
from specjax.models.quantized_cache import KVBuffer, QuantizedKV, quantize_kv

MIN_CAPACITY = 128
MIN_CHUNK = 16
MAX_CHUNK = 512  # the largest prefill chunk of any platform, in tokens of a row
MAX_TOKENS = 8192  # of a prefill pass, over all rows
# Cache positions that a ring has beside its window. A pass writes all its tokens before it reads,
# so its writes must not reach what its first token still sees; and the padding of a prompt's last
# chunk may be written past the prompt's end. Each takes one pass of the largest size.
RING_SPARE = 2 * MAX_CHUNK
MOVED = MIN_CAPACITY  # cache positions that are moved at a time


@struct.dataclass
class KVCache:
    """Keys and values of every layer: a tuple of L arrays ``[B, K, S, E]`` each.

    One array per layer, not one stacked array: an update then touches one buffer and XLA writes it
    in place. Cache position s of row b holds the token at position s while
    ``s < length[b] - 1``, where ``length`` counts the row's tokens. The last token is not in the
    cache yet: the next pass writes it. What is beyond that is scratch.

    A layer of a sliding window has at most ``ring_sizes[layer]`` cache positions: its window and
    :data:`RING_SPARE`. If it has that many, it is a ring: the token at position p is in cache
    position ``p % ring_sizes[layer]``, and what it overwrites is outside of every window. The ring
    size of other layers is None.

    Of a model with latent attention ``v`` is empty: its latents are keys and values at once.
    """

    k: tuple[KVBuffer, ...]
    v: tuple[KVBuffer, ...]
    ring_sizes: tuple[int | None, ...] = struct.field(pytree_node=False)

    def is_ring(self, layer: int) -> bool:
        """Whether token positions of this layer wrap around its cache positions."""
        return self.k[layer].shape[2] == self.ring_sizes[layer]


def ring_capacity(window: int | None) -> int | None:
    """The most cache positions of a layer with this window; None for a layer without one."""
    if window is None:
        return None
    # Rounded up to a multiple of this, so that the blocks of long caches divide a ring.
    step = RING_SPARE // 2
    return -(-(window + RING_SPARE) // step) * step


def ring_keeps_prefix(ring_size: int | None, prompt: int, shared: int) -> bool:
    """Whether a prefilled prompt's cache still serves another prompt that begins the same.

    A ring overwrites its oldest tokens. The other prompt goes on after the ``shared`` tokens, and
    its window there must still be in the ring.

    Args:
      ring_size: cache positions of the ring; None: the layer is no ring and keeps everything.
      prompt: tokens that were prefilled.
      shared: tokens that the two prompts begin with.
    """
    if ring_size is None:
        return True
    # The last chunk writes up to `MAX_CHUNK` positions past the prompt's end.
    nothing_overwritten = prompt + MAX_CHUNK <= ring_size
    # Half of `RING_SPARE` is for those writes. Of the other half only one half is relied on here.
    return nothing_overwritten or prompt - shared <= RING_SPARE // 4


def init_cache(cfg: ModelConfig, batch: int, capacity: int, dtype: DTypeLike) -> KVCache:
    """An empty cache; of dtype int8 a quantized one.

    Its size in bytes is ``batch`` times :func:`row_bytes`.
    """
    ring_sizes = tuple(ring_capacity(window) for window in cfg.windows)

    def empty_buffer(ring_size: int | None) -> KVBuffer:
        positions = min(capacity, ring_size or capacity)
        shape = (batch, cfg.cached_heads, positions, cfg.cached_size)
        entries = jnp.zeros(shape, dtype)
        if entries.dtype != jnp.int8:
            return entries
        return QuantizedKV(entries, jnp.zeros((*shape[:3], 1), jnp.float32))

    keys = tuple(empty_buffer(size) for size in ring_sizes)
    values = () if cfg.latent else tuple(empty_buffer(size) for size in ring_sizes)
    return KVCache(keys, values, ring_sizes)


def row_bytes(cfg: ModelConfig, capacity: int, dtype: DTypeLike) -> int:
    """Bytes of one row's cache; if the model is split, those on one device."""
    cache = jax.eval_shape(lambda: init_cache(cfg, 1, capacity, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def bucket(capacity: int) -> int:
    """The smallest of 128, 256, 384, 512, 768, 1024, 1536, … that is at least ``capacity``.

    The cost of a step follows this static length. With powers of two alone, up to half of what
    every step reads would be unused; from 256 on the sizes in between make that a third.
    """
    power = max(MIN_CAPACITY, power_of_two_from(capacity))
    between = power * 3 // 4
    if capacity <= between and between % MIN_CAPACITY == 0:
        return between
    return power


def bucket_below(capacity: int) -> int:
    """The next smaller bucket; the smallest one's is itself."""
    # A bucket is 4/3, 3/2 or twice the one before.
    for twelfths in (9, 8, 6):
        smaller = capacity * twelfths // 12
        if bucket(smaller) == smaller:
            return smaller
    return capacity


def chunk_size(prompt: int, rows: int = 1, least: int = MIN_CHUNK) -> int:
    """Tokens of a prefill chunk, a power of two.

    With many rows chunks are smaller, or activations would take a large share of the memory.

    Args:
      prompt: tokens of the longest prompt.
      rows: how many rows of one device are prefilled in a pass.
      least: the smallest chunk, a power of two.
    """
    fits_memory = power_of_two_upto(MAX_TOKENS // rows)
    wanted = max(least, power_of_two_from(prompt))
    return max(MIN_CHUNK, min(platform().prefill_chunk, fits_memory, wanted))


def chunk_sizes(largest: int) -> list[int]:
    """The chunk sizes up to ``largest`` that :func:`chunk_size` may give."""
    return [MIN_CHUNK << n for n in range((largest // MIN_CHUNK).bit_length())]


def power_of_two_from(least: int) -> int:
    """The smallest power of two that is at least this."""
    return 1 << (least - 1).bit_length()


def power_of_two_upto(most: int) -> int:
    """The largest power of two that is at most this; 0 for 0."""
    return 1 << most.bit_length() >> 1


def write(
    buffer: KVBuffer,
    new: Float[Array, "B K N E"],
    start: Int[Array, "B"],
    is_ring: bool = False,
) -> KVBuffer:
    """``buffer`` with each row's new entries from its ``start`` on, quantized if the buffer is."""
    write_entries = _writer(is_ring)
    if not isinstance(buffer, QuantizedKV):
        return write_entries(buffer, new, start)
    entries = quantize_kv(new)
    codes = write_entries(buffer.codes, entries.codes, start)
    scales = write_entries(buffer.scales, entries.scales, start)
    return QuantizedKV(codes, scales)


def _writer(is_ring: bool) -> Callable[[Array, Array, Array], Array]:
    return write_ring if is_ring else write_rows


def write_ring(
    buffer: Float[Array, "B K S E"], new: Float[Array, "B K N E"], start: Int[Array, "B"]
) -> Float[Array, "B K S E"]:
    """:func:`write_rows` modulo the capacity: what does not fit before the end wraps around.

    N may not exceed the capacity. There are two writes of N positions each. The first begins at
    ``start``, or before it so that it does not cross the buffer's end. The second begins at 0. A
    position that gets no new entry is written with its old one.
    """
    capacity = buffer.shape[2]
    count = new.shape[2]
    start = start % capacity
    if count == 1:
        return write_rows(buffer, new, start)

    for first in (jnp.minimum(start, capacity - count), jnp.zeros_like(start)):
        positions = first[:, None] + jnp.arange(count, dtype=start.dtype)
        # The index of the new entry that belongs into each position; `count` or more: none does.
        index = ((positions - start[:, None]) % capacity)[:, None, :, None]
        old = jnp.take_along_axis(buffer, positions[:, None, :, None], axis=2)
        clipped = jnp.minimum(index, count - 1)
        replacement = jnp.take_along_axis(new, clipped, axis=2).astype(old.dtype)
        buffer = write_rows(buffer, jnp.where(index < count, replacement, old), first)
    return buffer


def write_rows(
    buffer: Float[Array, "B K S E"], new: Float[Array, "B K N E"], start: Int[Array, "B"]
) -> Float[Array, "B K S E"]:
    """Writes each row's new entries at its own start, in place under donation.

    ``start + N`` may not exceed S: a slice that overflows is shifted, not cut.
    For a few rows there is one ``dynamic_update_slice`` per row (``Platform.unrolled_rows``). Under
    vmap it would become a scatter, which CPUs run entry by entry. For more rows it is a scatter
    all the same, because the unrolled program would grow with them.
    """
    new = new.astype(buffer.dtype)
    rows = buffer.shape[0]
    if rows > platform().unrolled_rows:
        positions = start[:, None] + jnp.arange(new.shape[2])
        return buffer.at[jnp.arange(rows)[:, None], :, positions].set(
            new.transpose(0, 2, 1, 3), mode="drop", unique_indices=True
        )

    if new.shape[2] == 1 and rows == 1 and platform().writes_neighbor:
        new, start = _with_neighbor(buffer, new, start)
    zero = jnp.zeros((), start.dtype)
    for row in range(rows):
        indices = (jnp.asarray(row, start.dtype), zero, start[row], zero)
        buffer = jax.lax.dynamic_update_slice(buffer, new[row : row + 1], indices)
    return buffer


def _with_neighbor(
    buffer: Float[Array, "1 K S E"], new: Float[Array, "1 K 1 E"], start: Int[Array, "1"]
) -> tuple[Float[Array, "1 K 2 E"], Int[Array, "1"]]:
    """The new entry together with what the cache holds next to it, and where the two begin.

    XLA for CPU fuses the write of a single entry into every operation that reads the buffer, which
    costs three copies of the cache per token. It does not do so for a write of two entries.
    """
    first = jnp.maximum(start - 1, 0)
    old = jax.lax.dynamic_slice_in_dim(buffer, first[0], 2, axis=2)
    is_new = first[:, None] + jnp.arange(2, dtype=start.dtype) == start[:, None]
    return jnp.where(is_new[:, None, :, None], new, old), first


def commit_path(cache: KVCache, start: Int[Array, "B"], path: Int[Array, "B D+1"]) -> KVCache:
    """Moves the entries of an accepted tree path into the positions ``start, start + 1, …``.

    ``path`` holds node indices. Entries past the accepted depth may be any index: what they move
    is written beyond the committed length.
    """

    def move(layer: int, buffer: Array) -> Array:
        source = start[:, None] + path
        capacity = buffer.shape[2]
        is_ring = cache.is_ring(layer)
        if is_ring:
            source = source % capacity
        else:
            source = jnp.clip(source, 0, capacity - 1)
        entries = jnp.take_along_axis(buffer, source[:, None, :, None], axis=2)
        return _writer(is_ring)(buffer, entries, start)

    return _map_layers(move, cache)


def take_rows(
    cache: KVCache, source: Int[Array, "B"], first: Int[Array, ""], last: Int[Array, ""]
) -> KVCache:
    """Row b becomes row ``source[b]``; rows that replace each other are equal before ``first``.

    Only positions ``first`` to ``last`` are moved, in blocks of :data:`MOVED`, so that a loop
    writes them in place: a gather of whole rows makes a second cache, which it would copy back. A
    ring is gathered as a whole.
    """
    # No block may reach beyond the end: it would be moved to the left, onto what has moved.
    capacity = max(buffer.shape[2] for buffer in cache.k)
    size = math.gcd(MOVED, capacity)

    def move_block(block: Int[Array, ""], cache: KVCache) -> KVCache:
        def move(layer: int, buffer: Array) -> Array:
            if cache.is_ring(layer):
                return buffer
            begin = block * size
            taken = jax.lax.dynamic_slice_in_dim(buffer, begin, size, axis=2)[source]
            # A fusion that reads the buffer and writes to it would write to a copy.
            taken = jax.lax.optimization_barrier(taken)
            return jax.lax.dynamic_update_slice_in_dim(buffer, taken, begin, axis=2)

        return _map_layers(move, cache)

    def gather_ring(layer: int, buffer: Array) -> Array:
        return buffer[source] if cache.is_ring(layer) else buffer

    cache = jax.lax.fori_loop(first // size, -(-last // size), move_block, cache)
    return _map_layers(gather_ring, cache)


def resize(tree: Any, capacity: int) -> Any:
    """``tree`` with every :class:`KVCache` in it padded or cut to ``capacity`` positions.

    Cut a cache only if no row has more tokens than ``capacity``. Then no ring has wrapped around
    yet, and the positions that are cut off hold nothing.
    """

    def resize_cache(node: Any) -> Any:
        if not isinstance(node, KVCache):
            return node

        def resize_buffer(layer: int, buffer: Array) -> Array:
            size = min(capacity, node.ring_sizes[layer] or capacity)
            padding = ((0, 0), (0, 0), (0, max(0, size - buffer.shape[2])), (0, 0))
            return jnp.pad(buffer[:, :, :size], padding)

        return _map_layers(resize_buffer, node)

    return jax.tree.map(resize_cache, tree, is_leaf=lambda node: isinstance(node, KVCache))


def _map_layers(function: Callable[[int, Array], Array], cache: KVCache) -> KVCache:
    """The cache of ``function(layer, array)`` for every array of every layer."""

    def map_buffers(buffers: tuple[KVBuffer, ...]) -> tuple[KVBuffer, ...]:
        mapped = []
        for layer, buffer in enumerate(buffers):
            mapped.append(jax.tree.map(functools.partial(function, layer), buffer))
        return tuple(mapped)

    return dataclasses.replace(cache, k=map_buffers(cache.k), v=map_buffers(cache.v))
