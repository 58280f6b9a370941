"""KV cache upkeep: prefill, commit of an accepted path, growing to the next bucket.

Axis legend: B rows, N new tokens, S slots, K key heads, E head size, D draft depth.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.models import KVCache, ModelConfig, forward
from specjax.models.functional import write_rows

MIN_SLOTS, MIN_CHUNK = 128, 16
# Tokens per prefill pass. Wider ones cost a CPU less per token, but the last pass is waste in part;
# accelerators want them wide.
MAX_CHUNK_CPU, MAX_CHUNK = 128, 512
SCORES = 1 << 28  # bytes of a layer's attention scores in a prefill pass: its largest array


def bucket(slots: int) -> int:
    """The next of 128, 256, 384, 512, 768, 1024, 1536, … that holds ``slots``.

    The cost of a step follows the static length: powers of two alone would leave up to half of
    what every step reads unused.
    """
    power = max(MIN_SLOTS, _power_of_two(slots))
    between = power * 3 // 4
    return between if slots <= between and between % MIN_SLOTS == 0 else power


def chunk_width(prompt: int, rows: int = 1, heads: int = 1) -> int:
    """The prefill width, a power of two, for ``rows`` whose longest prompt has ``prompt`` tokens.

    Rows and heads are those of one device. Many long rows go in narrower passes, or float32
    scores ``[B, H, chunk, S]`` would take a share of the memory that grows with the cache.
    """
    widest = MAX_CHUNK_CPU if jax.default_backend() == "cpu" else MAX_CHUNK
    fitting = SCORES // (4 * rows * heads * bucket(prompt))
    narrow = 1 << fitting.bit_length() >> 1
    return max(MIN_CHUNK, min(widest, narrow, _power_of_two(prompt)))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def prefill(
    cfg: ModelConfig,
    params: dict,
    cache: KVCache,
    tokens: Int[Array, "B S"],
    length: Int[Array, "B"],
    chunk: int,
) -> KVCache:
    """Fills the cache with the tokens before ``length``, ``chunk`` of them per pass.

    The number of passes is traced, so prompts of any length share one trace per bucket.
    Slots past a row's own length hold scratch that later writes replace.
    """
    rows = tokens.shape[0]

    def fill(carry):
        start, cache = carry
        piece = jax.lax.dynamic_slice_in_dim(tokens, start, chunk, axis=1)
        at = jnp.full((rows,), start, jnp.int32)
        positions = at[:, None] + jnp.arange(chunk, dtype=jnp.int32)
        _, cache = forward(cfg, params, cache, piece, positions, at)
        return start + chunk, cache

    end = jnp.max(length) - 1  # each row's last token is the first round's root
    return jax.lax.while_loop(lambda c: c[0] < end, fill, (jnp.int32(0), cache))[1]


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


def grow(tree: Any, slots: int) -> Any:
    """Every :class:`KVCache` inside ``tree``, padded to ``slots``."""

    def pad(node):
        if not isinstance(node, KVCache):
            return node
        extra = slots - node.slots
        return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0))), node)

    return jax.tree.map(pad, tree, is_leaf=lambda node: isinstance(node, KVCache))
