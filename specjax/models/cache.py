"""The KV cache: its buffers, their sizes, writes, and the commit of an accepted path.

Axis legend: B rows, N new tokens, S cache positions, L layers, K key heads, E head size, D draft
depth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.models.coded import Coded, encode
from specjax.models.config import ModelConfig

MIN_CAPACITY, MIN_CHUNK = 128, 16
# Tokens per prefill pass. Wider ones cost a CPU less per token, but the last pass is waste in part;
# accelerators want them wide.
MAX_CHUNK_CPU, MAX_CHUNK = 128, 512
MAX_TOKENS = 8192  # of a prefill pass, of all rows
# Up to this many rows the cache is written row by row; more would bloat the program.
UNROLLED_ROWS = 32
# Slots that a layer of a sliding window has beside its window: room for the widest pass, twice.
SPARE = 2 * MAX_CHUNK


@struct.dataclass
class KVCache:
    """Keys and values of every layer: a tuple of L arrays ``[B, K, S, E]`` each.

    One array per layer, not one stacked array: an update then touches one buffer and
    XLA writes it in place. Slot s of row b holds the token at position s while
    ``s < length[b] - 1``; higher positions are scratch.

    A layer of a sliding window has at most ``rings[layer]`` positions, None for others: what it
    sees, and :data:`SPARE`. There the token at position p lies in cache position ``p %
    rings[layer]``; the one whose place it takes is out of sight.
    """

    k: tuple[Float[Array, "B K S E"] | Coded, ...]
    v: tuple[Float[Array, "B K S E"] | Coded, ...]
    rings: tuple[int | None, ...] = struct.field(pytree_node=False)

    def goes_round(self, layer: int) -> bool:
        """Whether positions may exceed the layer's positions."""
        return self.k[layer].shape[2] == self.rings[layer]


def ring_capacity(window: int | None) -> int | None:
    """The most positions of a layer that sees so many positions; None: of one that sees all."""
    if window is None:
        return None
    step = SPARE // 2  # the blocks of long caches divide it
    return -(-(window + SPARE) // step) * step


def still_holds(ring: int | None, fed: int, same: int) -> bool:
    """Whether a layer of so many positions, fed a prompt, holds what the token after ``same`` sees.

    Pieces of prompts reach up to a pass behind their end, and of :data:`SPARE` a half is for that.
    """
    return ring is None or fed + MAX_CHUNK <= ring or fed - same <= SPARE // 4


def init_cache(cfg: ModelConfig, batch: int, capacity: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache, of int8 a coded one; its bytes are ``batch`` times :func:`row_bytes`."""
    rings = tuple(map(ring_capacity, cfg.windows))

    def empty(ring):
        shape = (batch, cfg.num_kv_heads, min(capacity, ring or capacity), cfg.head_dim)
        codes = jnp.zeros(shape, dtype)
        coded = codes.dtype == jnp.int8
        return Coded(codes, jnp.zeros((*shape[:3], 1), jnp.float32)) if coded else codes

    return KVCache(*(tuple(map(empty, rings)) for _ in "kv"), rings)


def row_bytes(cfg: ModelConfig, capacity: int, dtype: jnp.dtype) -> int:
    """Bytes of a row's cache; of a split model those of one device."""
    cache = jax.eval_shape(lambda: init_cache(cfg, 1, capacity, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def bucket(capacity: int) -> int:
    """The next of 128, 256, 384, 512, 768, 1024, 1536, … that holds ``capacity``.

    The cost of a step follows the static length: powers of two alone would leave up to half of
    what every step reads unused.
    """
    power = max(MIN_CAPACITY, _power_of_two(capacity))
    between = power * 3 // 4
    return between if capacity <= between and between % MIN_CAPACITY == 0 else power


def bucket_below(capacity: int) -> int:
    """The bucket before one; the smallest one's is itself."""
    smaller = (capacity * share // 12 for share in (9, 8, 6))
    return next((size for size in smaller if bucket(size) == size), capacity)


def chunk_size(prompt: int, rows: int = 1, least: int = MIN_CHUNK) -> int:
    """The chunk size of prefill, a power of two, for ``rows`` of one device, the longest of
    ``prompt``.

    Many rows go in narrower passes, or activations would take a share of the memory. ``least``, a
    power of two: the smallest chunk.
    """
    largest = MAX_CHUNK_CPU if jax.default_backend() == "cpu" else MAX_CHUNK
    fitting = 1 << (MAX_TOKENS // rows).bit_length() >> 1
    return max(MIN_CHUNK, min(largest, fitting, max(least, _power_of_two(prompt))))


def chunk_sizes(largest: int) -> list[int]:
    """The chunk sizes, up to ``largest``, that :func:`chunk_size` gives."""
    return [MIN_CHUNK << n for n in range((largest // MIN_CHUNK).bit_length())]


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def write(
    buffer: Float[Array, "B K S E"] | Coded,
    new: Float[Array, "B K N E"],
    start: Int[Array, "B"],
    around: bool = False,
) -> Float[Array, "B K S E"] | Coded:
    """:func:`write_rows`, ``around`` the end where positions go round; coded if the buffer is."""
    put = write_around if around else write_rows
    if not isinstance(buffer, Coded):
        return put(buffer, new, start)
    return Coded(*(put(*pair, start) for pair in zip(buffer, encode(new), strict=True)))


def write_around(
    buffer: Float[Array, "B K S E"], new: Float[Array, "B K N E"], start: Int[Array, "B"]
) -> Float[Array, "B K S E"]:
    """:func:`write_rows` modulo the positions: what does not fit before the end goes to the
    front."""
    capacity, count = buffer.shape[2], new.shape[2]
    start = start % capacity
    if count == 1:
        return write_rows(buffer, new, start)
    for first in (jnp.minimum(start, capacity - count), jnp.zeros_like(start)):
        at = first[:, None] + jnp.arange(count, dtype=start.dtype)
        # The new entry that belongs in each of these positions; at the front there is none in most.
        entry = ((at - start[:, None]) % capacity)[:, None, :, None]
        old = jnp.take_along_axis(buffer, at[:, None, :, None], axis=2)
        own = jnp.take_along_axis(new, jnp.minimum(entry, count - 1), axis=2).astype(old.dtype)
        buffer = write_rows(buffer, jnp.where(entry < count, own, old), first)
    return buffer


def write_rows(
    buffer: Float[Array, "B K S E"], new: Float[Array, "B K N E"], start: Int[Array, "B"]
) -> Float[Array, "B K S E"]:
    """Writes each row's new entries at its own start, in place under donation.

    One ``dynamic_update_slice`` per row: under vmap it becomes a scatter, which CPUs run
    entry by entry. Large batches take the scatter, their program would grow with the rows.
    """
    new = new.astype(buffer.dtype)
    rows = buffer.shape[0]
    if rows > UNROLLED_ROWS:
        positions = start[:, None] + jnp.arange(new.shape[2])
        return buffer.at[jnp.arange(rows)[:, None], :, positions].set(
            new.transpose(0, 2, 1, 3), mode="drop", unique_indices=True
        )
    if new.shape[2] == 1 and rows == 1 and jax.default_backend() == "cpu":
        new, start = _with_neighbour(buffer, new, start)
    zero = jnp.zeros((), start.dtype)
    for row in range(rows):
        where = (jnp.asarray(row, start.dtype), zero, start[row], zero)
        buffer = jax.lax.dynamic_update_slice(buffer, new[row : row + 1], where)
    return buffer


def _with_neighbour(
    buffer: Float[Array, "1 K S E"], new: Float[Array, "1 K 1 E"], start: Int[Array, "1"]
) -> tuple[Float[Array, "1 K 2 E"], Int[Array, "1"]]:
    """One entry as two, the other being what the cache holds, and the cache position of the first.

    XLA for CPU makes the write of a lone entry part of every operation that reads the buffer:
    three copies of the cache per token. The write of two entries it leaves alone.
    """
    first = jnp.maximum(start - 1, 0)
    old = jax.lax.dynamic_slice_in_dim(buffer, first[0], 2, axis=2)
    ours = first[:, None] + jnp.arange(2, dtype=start.dtype) == start[:, None]
    return jnp.where(ours[:, None, :, None], new, old), first


def commit_path(cache: KVCache, start: Int[Array, "B"], path: Int[Array, "B D+1"]) -> KVCache:
    """Moves the entries of an accepted tree path into the positions ``start, start + 1, …``.

    ``path`` holds node indices; entries past the accepted depth may be any index: what
    they move lands beyond the committed length.
    """

    def move(layer, buffer):
        source, capacity, around = start[:, None] + path, buffer.shape[2], cache.goes_round(layer)
        source = source % capacity if around else jnp.clip(source, 0, capacity - 1)
        kept = jnp.take_along_axis(buffer, source[:, None, :, None], axis=2)
        return (write_around if around else write_rows)(buffer, kept, start)

    return _each_layer(move, cache)


def resize(tree: Any, capacity: int) -> Any:
    """Every :class:`KVCache` inside ``tree`` with ``capacity`` positions, the last ones new or cut
    off.

    They are cut off where no row has as many tokens: its positions have not gone round.
    """

    def fit(node):
        def of_layer(layer, buffer):
            size = min(capacity, node.rings[layer] or capacity)
            room = ((0, 0), (0, 0), (0, max(0, size - buffer.shape[2])), (0, 0))
            return jnp.pad(buffer[:, :, :size], room)

        return _each_layer(of_layer, node) if isinstance(node, KVCache) else node

    return jax.tree.map(fit, tree, is_leaf=lambda node: isinstance(node, KVCache))


def _each_layer(function: Callable[[int, Array], Array], cache: KVCache) -> KVCache:
    """``function(layer, array)`` of every array of the cache."""

    def of(buffers):
        each = enumerate(buffers)
        return tuple(jax.tree.map(functools.partial(function, i), buffer) for i, buffer in each)

    return cache.replace(k=of(cache.k), v=of(cache.v))
