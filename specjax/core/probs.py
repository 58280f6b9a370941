"""Probabilities: float32 log-softmax, residuals, inverse-CDF sampling, random streams.

Acceptance arithmetic is float32 whatever the model's dtype: bfloat16 rows do not sum to 1.
Axis legend: B rows, V vocabulary, or a device's share of it (:mod:`specjax.core.vocabulary`);
``...`` are leading axes.
"""

from __future__ import annotations

import enum
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from specjax._util.platform import platform
from specjax.core import vocabulary

NEVER = -jnp.inf  # the log-probability of what cannot happen
STREAM = 1 << 16  # indices of one purpose: the purpose is folded in above these bits


class Purpose(enum.IntEnum):
    """Separate random streams of one round.

    How many numbers one purpose draws never changes those of another.
    """

    DRAFT = 0
    ACCEPT = 1
    EMIT = 2
    SEARCH = 3
    POSITION = 4


def seed_key(seed: int) -> Key[Array, ""]:
    """The key of a seed of up to 64 bits; below 2³² it is ``jax.random.key(seed)``.

    Without 64-bit types, ``jax.random.key`` drops the upper bits or refuses them.
    """
    key = jax.random.key(seed % 2**32)
    if seed < 2**32:
        return key
    # The two words of a Threefry key: jax.random.key(seed) with 64-bit types has the same.
    words = np.array([seed >> 32, seed % 2**32], np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl=jax.random.key_impl(key))


def round_keys(keys: Key[Array, "B"], rounds: Int[Array, "B"]) -> Key[Array, "B"]:
    """Each row's key of one round: ``fold_in(row key, round)``. It depends on no other row."""
    return jax.vmap(jax.random.fold_in)(keys, rounds)


def position_uniforms(keys: Key[Array, "B"], position: Int[Array, "B"]) -> Float[Array, "B"]:
    """One uniform in (0, 1] for each row's token at ``position`` of the output.

    It depends on the position alone, not on the round that writes the token.
    """
    nothing = jnp.zeros((*keys.shape, 1), jnp.int32)
    return uniforms(round_keys(keys, position), Purpose.POSITION, nothing)[:, 0]


def draw_keys(
    keys: Key[Array, "B"], purpose: Purpose, index: Int[Array, "B"] | int
) -> Key[Array, "B"]:
    """Keys of one draw: the round's key folded with purpose and position or node index.

    Indices are from 0 to ``STREAM`` − 1.
    """
    folded = _folded(purpose, index)
    return jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(folded, keys.shape))


def _folded(purpose: Purpose, index: Int[Array, "..."] | int) -> Int[Array, "..."]:
    """The numbers that are folded into a key: apart for any two pairs of purpose and index.

    An index on the device is not checked: a round has far fewer nodes and steps.
    """
    if isinstance(index, int | np.ndarray):
        indices = np.asarray(index)
        in_range = (indices >= 0) & (indices < STREAM)
        assert in_range.all(), f"indices of random numbers are from 0 to {STREAM - 1}"
    return int(purpose) * STREAM + jnp.asarray(index, jnp.int32)


def uniforms(
    keys: Key[Array, "B"], purpose: Purpose, index: Int[Array, "B n"]
) -> Float[Array, "B n"]:
    """One uniform in (0, 1] per row and index (below ``STREAM``), each from its own draw key."""
    folded = _folded(purpose, index)

    def draw(key, i):
        # JAX draws from [0, 1). At a quantile of 0, `sample` could return a token of weight 0.
        return 1.0 - jax.random.uniform(jax.random.fold_in(key, i), dtype=jnp.float32)

    return jax.vmap(jax.vmap(draw, (None, 0)))(keys, folded)


def gumbel(
    keys: Key[Array, "B *n"], size: int, drawn: Bool[Array, "B"]
) -> Float[Array, "B *n size"]:
    """Gumbel noise, one draw per key; 0 in rows that are not ``drawn``.

    It costs nothing if no row is drawn. The n largest of log-weights plus noise are n draws without
    replacement (Gumbel-top-k). An id's noise does not depend on which device has it.
    """

    def draw(key):
        if not vocabulary.is_split():
            return jax.random.gumbel(key, (size,), jnp.float32)
        return vocabulary.own_share(jax.random.gumbel(key, (vocabulary.size(size),), jnp.float32))

    def noise():
        flat = jax.vmap(draw)(keys.reshape(-1))
        rows = drawn.reshape(-1, *(1,) * keys.ndim)
        return jnp.where(rows, flat.reshape(*keys.shape, size), 0.0)

    return jax.lax.cond(jnp.any(drawn), noise, lambda: jnp.zeros((*keys.shape, size), jnp.float32))


def log_softmax(logits: Float[Array, "... V"]) -> Float[Array, "... V"]:
    """Float32 log-softmax. Rows may hold −inf, but not only −inf."""
    x = logits.astype(jnp.float32)
    if not vocabulary.is_split():
        return jax.nn.log_softmax(x, axis=-1)
    x = x - vocabulary.largest(x, keepdims=True)
    return x - jnp.log(vocabulary.total(jnp.exp(x), keepdims=True))


def one_hot_log(token: Int[Array, "..."], vocab: int) -> Float[Array, "... V"]:
    """Log-probabilities of a point mass: 0 at the token, −inf elsewhere."""
    return jnp.where(vocabulary.ids(vocab) == token[..., None], 0.0, NEVER)


def at_token(rows: Float[Array, "... V"], token: Int[Array, "..."]) -> Float[Array, "..."]:
    """The entry of each row of a vocabulary at its token."""
    if not vocabulary.is_split():
        return at_index(rows, token)
    width = rows.shape[-1]
    index = token - vocabulary.first_id(width)
    entry = at_index(rows, jnp.clip(index, 0, width - 1))
    is_own = (index >= 0) & (index < width)
    return vocabulary.across(jnp.sum, jnp.where(is_own, entry, 0))


def at_index(rows: Shaped[Array, "... n"], index: Int[Array, "..."]) -> Shaped[Array, "..."]:
    """The entry of each row at its index."""
    return jnp.take_along_axis(rows, index[..., None], axis=-1)[..., 0]


def at_node(rows: Float[Array, "B N V"], node: Int[Array, "B"]) -> Float[Array, "B V"]:
    """Each row's distribution at one node; only these V entries are read."""
    if rows.shape[1] == 1:
        return rows[:, 0]
    return jnp.take_along_axis(rows, node[:, None, None], axis=1)[:, 0]


def limit_vocabulary(logits: Float[Array, "... V"], vocab_limit: int) -> Float[Array, "... V"]:
    """Logits with −inf at ids from ``vocab_limit`` on: padding that no tokenizer knows."""
    width = logits.shape[-1]
    if vocab_limit >= vocabulary.size(width):
        return logits
    return jnp.where(vocabulary.ids(width) < vocab_limit, logits, NEVER)


def fit_vocabulary(logits: Float[Array, "... v"], vocab: int) -> Float[Array, "... V"]:
    """Draft logits over the target's ids: padded with −inf, or cut if there are more."""
    width = logits.shape[-1]
    if width >= vocab:
        return logits[..., :vocab]
    pad = [(0, 0)] * (logits.ndim - 1) + [(0, vocab - width)]
    return jnp.pad(logits, pad, constant_values=NEVER)


def top_k(x: Float[Array, "... V"], count: int) -> tuple[Array, Array]:
    """The ``count`` largest values ``[..., k]``, in order, and their indices int32.

    As ``jax.lax.top_k``, the lowest index first on ties. Where XLA would sort a long row, blocks of
    it are sorted, and then what is left of them.
    """
    block = max(platform().sort_block, 2 * count)
    if count <= platform().top_k_kernel or x.shape[-1] <= block:
        return jax.lax.top_k(x, count)

    # Padding is never among the largest: real values of −inf have lower indices.
    num_blocks = -(-x.shape[-1] // block)  # rounded up
    padding = [(0, 0)] * (x.ndim - 1) + [(0, num_blocks * block - x.shape[-1])]
    padded = jnp.pad(x, padding, constant_values=NEVER)
    blocks = padded.reshape(*x.shape[:-1], num_blocks, block)
    values, index = jax.lax.top_k(blocks, count)
    index = index + block * jnp.arange(num_blocks)[:, None]

    left = *x.shape[:-1], num_blocks * count
    values, chosen = top_k(values.reshape(left), count)
    return values, jnp.take_along_axis(index.reshape(left), chosen, axis=-1)


def residual(p: Float[Array, "... V"], q: Float[Array, "... V"]) -> Float[Array, "... V"]:
    """Unnormalized ``max(0, p - q)``, or ``p`` where that is zero everywhere."""
    left = jnp.maximum(p - q, 0.0)
    return jnp.where(vocabulary.total(left, keepdims=True) > 0, left, p)


@jax.named_scope("draw")
def sample(weights: Float[Array, "... V"], u: Float[Array, "..."]) -> Int[Array, "..."]:
    """The token at quantile ``u`` of unnormalized ``weights``: inverse CDF, in id order.

    Never a token of weight 0, for any ``u`` in (0, 1]. It first finds a block of about √V tokens,
    then the token in it: a cumulative sum over the vocabulary costs ten times a plain sum.
    """
    vocab = weights.shape[-1]
    block_size = 1 << max(1, math.ceil(math.log2(vocab) / 2))
    pad = [(0, 0)] * (weights.ndim - 1) + [(0, -vocab % block_size)]
    blocks = jnp.pad(weights, pad).reshape(*weights.shape[:-1], -1, block_size)
    ends = jnp.cumsum(blocks.sum(-1), axis=-1)
    goal = u * ends[..., -1]
    device = None
    if vocabulary.is_split():
        device, goal = _device_at(u, ends[..., -1])
    goal = goal[..., None]
    block = jnp.argmax(ends >= goal, axis=-1)[..., None]
    before = jnp.where(block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0), -1), 0.0)
    inside = jnp.cumsum(jnp.take_along_axis(blocks, block[..., None], -2)[..., 0, :], axis=-1)
    # Rounding may leave the goal past the block's own sum. Then it is the last positive token.
    goal = jnp.minimum(goal - before, inside[..., -1:])
    token = (block[..., 0] * block_size + jnp.argmax(inside >= goal, axis=-1)).astype(jnp.int32)
    if device is None:
        return token
    return vocabulary.from_device(token + vocabulary.first_id(vocab), device)


def _device_at(
    u: Float[Array, "..."], mass: Float[Array, "..."]
) -> tuple[Int[Array, "..."], Float[Array, "..."]]:
    """The device at quantile ``u``, by the ``mass`` of each device's share.

    Also how much of that device's mass is up to the quantile. On other devices this is any number.
    """
    ends = jnp.cumsum(vocabulary.gathered(mass), axis=0)
    goal = u * ends[-1]
    own = vocabulary.own_number()
    before = jnp.where(own > 0, ends[own - 1], 0.0)
    # Rounding may leave the goal past the device's own sum.
    return jnp.argmax(ends >= goal, axis=0), jnp.minimum(goal - before, mass)
