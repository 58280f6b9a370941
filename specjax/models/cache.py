"""The KV cache: its buffers, their sizes, writes, and the commit of an accepted path.

Axis legend: B rows, N new tokens, S slots, L layers, K key heads, E head size, D draft depth.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.models.coded import Coded, encode
from specjax.models.config import ModelConfig

MIN_SLOTS, MIN_CHUNK = 128, 16
# Tokens per prefill pass. Wider ones cost a CPU less per token, but the last pass is waste in part;
# accelerators want them wide.
MAX_CHUNK_CPU, MAX_CHUNK = 128, 512
MAX_TOKENS = 8192  # of a prefill pass, of all rows
# Up to this many rows the cache is written row by row; more would bloat the program.
UNROLLED_ROWS = 32


class KVCache(NamedTuple):
    """Keys and values of every layer: a tuple of L arrays ``[B, K, S, E]`` each.

    One array per layer, not one stacked array: an update then touches one buffer and
    XLA writes it in place. Slot s of row b holds the token at position s while
    ``s < length[b] - 1``; higher slots are scratch.
    """

    k: tuple[Float[Array, "B K S E"] | Coded, ...]
    v: tuple[Float[Array, "B K S E"] | Coded, ...]

    @property
    def slots(self) -> int:
        return self.k[0].shape[2]


def init_cache(cfg: ModelConfig, batch: int, slots: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache, of int8 a coded one; its bytes are ``batch · slots`` :func:`slot_bytes`."""
    shape = (batch, cfg.num_kv_heads, slots, cfg.head_dim)

    def empty():
        codes = jnp.zeros(shape, dtype)
        coded = codes.dtype == jnp.int8
        return Coded(codes, jnp.zeros((*shape[:3], 1), jnp.float32)) if coded else codes

    return KVCache(*(tuple(empty() for _ in range(cfg.num_layers)) for _ in "kv"))


def slot_bytes(cfg: ModelConfig, dtype: jnp.dtype) -> int:
    """Bytes of a cache per slot and row; of a split model those of one device."""
    cache = jax.eval_shape(lambda: init_cache(cfg, 1, 1, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def bucket(slots: int) -> int:
    """The next of 128, 256, 384, 512, 768, 1024, 1536, … that holds ``slots``.

    The cost of a step follows the static length: powers of two alone would leave up to half of
    what every step reads unused.
    """
    power = max(MIN_SLOTS, _power_of_two(slots))
    between = power * 3 // 4
    return between if slots <= between and between % MIN_SLOTS == 0 else power


def bucket_below(slots: int) -> int:
    """The bucket before one; the smallest one's is itself."""
    smaller = (slots * share // 12 for share in (9, 8, 6))
    return next((size for size in smaller if bucket(size) == size), slots)


def chunk_width(prompt: int, rows: int = 1, least: int = MIN_CHUNK) -> int:
    """The prefill width, a power of two, for ``rows`` of one device, the longest of ``prompt``.

    Many rows go in narrower passes, or activations would take a share of the memory. ``least``, a
    power of two: the narrowest width.
    """
    widest = MAX_CHUNK_CPU if jax.default_backend() == "cpu" else MAX_CHUNK
    fitting = 1 << (MAX_TOKENS // rows).bit_length() >> 1
    return max(MIN_CHUNK, min(widest, fitting, max(least, _power_of_two(prompt))))


def widths(widest: int) -> list[int]:
    """The widths, up to ``widest``, that :func:`chunk_width` gives."""
    return [MIN_CHUNK << n for n in range((widest // MIN_CHUNK).bit_length())]


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def write(
    buffer: Float[Array, "B K S E"] | Coded, new: Float[Array, "B K N E"], start: Int[Array, "B"]
) -> Float[Array, "B K S E"] | Coded:
    """:func:`write_rows`, coded where the buffer is."""
    if not isinstance(buffer, Coded):
        return write_rows(buffer, new, start)
    return Coded(*(write_rows(*pair, start) for pair in zip(buffer, encode(new), strict=True)))


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
        slots = start[:, None] + jnp.arange(new.shape[2])
        return buffer.at[jnp.arange(rows)[:, None], :, slots].set(
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
    """One entry as two, the other being what the cache holds, and the slot of the first.

    XLA for CPU makes the write of a lone entry part of every operation that reads the buffer:
    three copies of the cache per token. The write of two entries it leaves alone.
    """
    first = jnp.maximum(start - 1, 0)
    old = jax.lax.dynamic_slice_in_dim(buffer, first[0], 2, axis=2)
    ours = first[:, None] + jnp.arange(2, dtype=start.dtype) == start[:, None]
    return jnp.where(ours[:, None, :, None], new, old), first


def commit_path(cache: KVCache, start: Int[Array, "B"], path: Int[Array, "B D+1"]) -> KVCache:
    """Moves the entries of an accepted tree path into the slots ``start, start + 1, …``.

    ``path`` holds node indices; entries past the accepted depth may be any index: what
    they move lands beyond the committed length.
    """
    slots = cache.slots
    source = jnp.clip(start[:, None] + path, 0, slots - 1)

    def move(buffer):
        kept = jnp.take_along_axis(buffer, source[:, None, :, None], axis=2)
        return write_rows(buffer, kept, start)

    return jax.tree.map(move, cache)


def resize(tree: Any, slots: int) -> Any:
    """Every :class:`KVCache` inside ``tree`` with ``slots`` slots, the last ones new or cut off."""

    def fit(node):
        if not isinstance(node, KVCache):
            return node
        room = ((0, 0), (0, 0), (0, max(0, slots - node.slots)), (0, 0))
        return jax.tree.map(lambda x: jnp.pad(x[:, :, :slots], room), node)

    return jax.tree.map(fit, tree, is_leaf=lambda node: isinstance(node, KVCache))
