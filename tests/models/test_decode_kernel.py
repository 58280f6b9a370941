"""The GPU's kernel for narrow passes against dense attention: elsewhere in Pallas' interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax._util.platform import CPU
from specjax.models.attention import decode_kernel, dense
from specjax.models.attention.decode_kernel import decode_attention, supports_decode
from specjax.models.attention.dense import ScoreTransform
from specjax.models.cache import write_ring
from specjax.models.quantized_cache import QuantizedKV

# Rows, tokens, query heads, key heads, capacity, head size.
SHAPES = [(2, 8, 8, 2, 256, 16), (1, 5, 4, 4, 128, 32), (3, 1, 8, 1, 640, 16)]
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
INTERPRET = jax.default_backend() != "gpu"


@pytest.fixture(autouse=True)
def exact_products():
    """A GPU would round float32 operands of the reference to 10 bits."""
    with jax.default_matmul_precision("highest"):
        yield


def arrays(shape, dtype, seed=0):
    """Queries, keys, values, and the number of committed tokens of each row."""
    rows, tokens, heads, key_heads, capacity, size = shape
    generator = np.random.Generator(np.random.Philox(seed))

    def normal(*dims):
        return jnp.asarray(generator.normal(size=dims), dtype)

    q = normal(rows, tokens, heads, size)
    k = normal(rows, key_heads, capacity, size)
    v = normal(rows, key_heads, capacity, size)
    base = jnp.asarray(generator.integers(0, capacity - tokens, rows), jnp.int32)
    return q, k, v, base


def attended(q, k, v, base, tokens, positions, mask=None, **options):
    """The kernel's result where it writes ``tokens`` entries itself; they must be all it writes."""
    rows = jnp.arange(k.shape[0])[:, None]
    places = base[:, None] + jnp.arange(tokens)
    padding = ((0, 0), (0, q.shape[1] - tokens), (0, 0), (0, 0))
    new = [jnp.pad(x[rows, :, places], padding, constant_values=99.0) for x in (k, v)]
    before = [x.at[rows, :, places].set(-77.0) for x in (k, v)]
    last = base + tokens - 1
    out, *after = decode_attention(
        q, *new, *before, base, tokens, positions, last, mask, interpret=INTERPRET, **options
    )
    for got, want in zip(after, (k, v), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    return out


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_chains_equal_attention_to_the_whole_cache(shape, window, dtype):
    q, k, v, base = arrays(shape, dtype)
    count = shape[1]
    capacity = shape[4]
    transform = ScoreTransform(softcap=20.0)
    positions = base[:, None] + jnp.arange(count, dtype=jnp.int32)
    mask = dense.in_window(dense.chain_distances(positions, capacity), window)

    want = dense.dense_attention(q, k, v, mask, transform)
    got = attended(q, k, v, base, count, positions, window=window, transform=transform)
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(want, np.float32), atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_trees_equal_attention_to_the_whole_cache(shape):
    """Each node sees the committed tokens, its ancestors and itself."""
    q, k, v, base = arrays(shape, "float32", seed=1)
    rows, count = shape[:2]
    capacity = shape[4]
    parents = np.array([-1, 0, 0, 1, 1, 2, 2, 5])[:count]
    visible = np.eye(count, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] |= visible[parent]
    depth = visible.sum(1) - 1
    positions = base[:, None] + jnp.asarray(depth, jnp.int32)
    tree = jnp.broadcast_to(visible, (rows, count, count))
    mask = dense.cache_mask(positions, base, tree, count, capacity)

    want = dense.dense_attention(q, k, v, mask)
    got = attended(q, k, v, base, count, positions, mask)
    np.testing.assert_allclose(got, want, atol=1e-5)

    # A sibling in place of the node itself must show.
    wrong = dense.cache_mask(positions, base, tree[:, ::-1], count, capacity)
    other = attended(q, k, v, base, count, positions, wrong)
    assert np.abs(other - want).max() > 1e-2


def test_blocks_past_the_last_visible_position_are_not_read():
    """There the cache may hold anything, NaN included."""
    q, k, v, _ = arrays((2, 4, 8, 2, 512, 16), "float32")
    base = jnp.array([10, 100], jnp.int32)
    positions = base[:, None] + jnp.arange(4, dtype=jnp.int32)
    block = decode_kernel.BLOCK
    end = (np.asarray(base) + 3) // block * block + block
    beyond = np.arange(512) >= end[:, None]
    broken = jnp.where(beyond[:, None, :, None], jnp.nan, k)

    want = attended(q, k, v, base, 4, positions)
    got = attended(q, broken, v, base, 4, positions)
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(got, want)


def test_a_result_does_not_depend_on_padding_of_the_pass():
    """In bfloat16, too: greedy speculative decoding then equals plain decoding."""
    shape = (2, 8, 8, 2, 256, 16)
    q, k, v, base = arrays(shape, "bfloat16")
    positions = base[:, None] + jnp.arange(8, dtype=jnp.int32)
    alone = jnp.repeat(q[:, :1], 8, axis=1)
    whole = attended(q, k, v, base, 8, positions)
    padded = attended(alone, k, v, base, 1, jnp.repeat(positions[:, :1], 8, axis=1))
    np.testing.assert_array_equal(whole[:, 0], padded[:, 0])


@pytest.mark.parametrize("kind", ["chain", "window", "tree"])
def test_a_result_does_not_depend_on_the_capacity(kind):
    """Nor on positions that a query does not see: methods whose rounds need more room, or whose
    caches grow earlier, then give the same greedy tokens."""
    rows, tokens = 2, 8
    q, k, v, _ = arrays((rows, tokens, 4, 2, 1024, 16), "float32")  # rounding would hide much
    base = jnp.array([200, 370], jnp.int32)
    positions = base[:, None] + jnp.arange(tokens, dtype=jnp.int32)
    window = 90 if kind == "window" else None

    def attend(capacity):
        """Of the first query, beside seven more, and beside copies of it."""
        keys, values = k[:, :, :capacity], v[:, :, :capacity]
        results = []
        for at in (jnp.arange(tokens), jnp.zeros(tokens, jnp.int32)):
            queries, places = q[:, at], positions[:, at]
            mask = None
            if kind == "tree":
                mask = jnp.arange(capacity) <= places[:, :, None]
            count = int((places.max(axis=1) - base)[0]) + 1
            out = attended(queries, keys, values, base, count, places, mask, window=window)
            results.append(np.asarray(out[:, 0], np.float32))
        return results

    (want, alone), others = attend(384), [attend(512), attend(1024)]
    np.testing.assert_array_equal(alone, want)
    for got in (row for pair in others for row in pair):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_new_entries_wrap_around_the_end_of_a_ring(tokens):
    """As :func:`write_ring` does; the other rows and heads stay as they were."""
    q, k, v, _ = arrays((3, tokens, 8, 2, 128, 16), "float32")
    start = jnp.array([127, 254, 70], jnp.int32)  # the second row has wrapped before
    others = arrays((3, tokens, 8, 2, 128, 16), "float32", seed=5)[1:3]
    new = [x[:, :, :tokens].transpose(0, 2, 1, 3) for x in others]
    positions = start[:, None] + jnp.arange(tokens, dtype=jnp.int32)
    mask = jnp.ones((3, tokens, 128), bool)
    want = [write_ring(x, y.transpose(0, 2, 1, 3), start) for x, y in zip((k, v), new, strict=True)]

    last = start + tokens - 1
    out, *got = decode_attention(
        q, *new, k, v, start, tokens, positions, last, mask, interpret=INTERPRET
    )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(out, dense.dense_attention(q, *want, mask), atol=1e-5)


def test_what_the_kernel_cannot_do_is_left_to_others(monkeypatch):
    with_kernel = dataclasses.replace(CPU, decode_kernel=True)
    cache = jax.ShapeDtypeStruct((1, 2, 256, 64), jnp.bfloat16)
    plain = ScoreTransform()
    monkeypatch.setattr(decode_kernel, "platform", lambda: CPU)
    assert not supports_decode(8, 8, cache, plain)
    monkeypatch.setattr(decode_kernel, "platform", lambda: with_kernel)
    assert supports_decode(8, 8, cache, plain)
    assert not supports_decode(64, 8, cache, plain)  # a wide pass
    assert not supports_decode(8, 8, jax.ShapeDtypeStruct((1, 2, 256, 80), jnp.bfloat16), plain)
    assert not supports_decode(8, 8, jax.ShapeDtypeStruct((1, 2, 100, 64), jnp.bfloat16), plain)
    assert not supports_decode(8, 8, cache, ScoreTransform(alibi=True))
    codes = jnp.zeros((1, 2, 256, 64), jnp.int8)
    assert not supports_decode(8, 8, QuantizedKV(codes, jnp.ones((1, 2, 256, 1))), plain)
