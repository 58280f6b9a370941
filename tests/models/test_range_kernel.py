"""The GPU's kernels for long rows and prefill: elsewhere in Pallas' interpreter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from specjax._util.platform import CPU
from specjax.models.attention import dense, range_kernel
from specjax.models.attention.dense import Causal, Isolated, ScoreTransform
from specjax.models.attention.key_ranges import mask_ranges, supports_ranges, visits_of
from specjax.models.attention.long_sequences import long_attention
from specjax.models.attention.range_kernel import (
    KernelBlocks,
    RangeBlocks,
    make_tables,
    prefill_attention,
    sequence_attention,
)
from specjax.models.quantized_cache import QuantizedKV
from train.sdsat.insertion import Insertion, append_windows

CLEAN, APPENDED, LONGEST, SIZE = 70, 30, 4, 16
INTERPRET = jax.default_backend() != "gpu"
BLOCKS = KernelBlocks(RangeBlocks(32, 16), RangeBlocks(32, 16), RangeBlocks(16, 16))
WITH_KERNEL = dataclasses.replace(CPU, range_kernel=True)

MASKS = {
    "causal": (Causal(), ScoreTransform()),
    "sliding": (Causal(window=9), ScoreTransform(scale=0.3)),
    "chunked": (Causal(window=16, chunked=True), ScoreTransform()),
    "isolated": (Isolated(clean=CLEAN), ScoreTransform(softcap=1.5)),
    "isolated, sliding": (Isolated(clean=CLEAN, window=7), ScoreTransform()),
}


@pytest.fixture(autouse=True)
def exact_products():
    """A GPU would round float32 operands of the reference to 10 bits."""
    with jax.default_matmul_precision("highest"):
        yield


@functools.cache
def packed_rows():
    """Two rows of documents, the second padded, followed by windows of up to LONGEST tokens."""
    rows = []
    for documents in ((40, 30), (23, 20, 17)):
        segments = np.repeat(np.arange(1, len(documents) + 1), documents)
        positions = np.concatenate([np.arange(n) for n in documents])
        pad = (0, CLEAN - len(segments))
        blank = np.zeros(CLEAN, np.int64)
        row = {"segments": np.pad(segments, pad), "positions": np.pad(positions, pad)}
        row |= {"tokens": blank, "labels": blank}
        starts, counts = np.array([0, 6, 7, 21, 44, 52]), np.array([1, 4, 2, 2, 3, 4])
        insertion = Insertion((7,) * LONGEST)
        rows.append(append_windows(row, starts, counts, APPENDED, insertion))
    names = {"segments": "segment", "positions": "position", "windows": "windows"}
    names["starts"] = "starts"
    return {ours: np.stack([row[name] for row in rows]) for name, ours in names.items()}


def meta_of(mask):
    """The rows, and with windows if the mask has them."""
    count = CLEAN + APPENDED * isinstance(mask, Isolated)
    return {name: x[:, :count] for name, x in packed_rows().items()}


def arrays(count, keys, dtype, heads=4, key_heads=2):
    """Queries, keys, values, and a cotangent of two rows."""
    generator = np.random.Generator(np.random.Philox(0))
    shapes = (2, count, heads, SIZE), *((2, key_heads, keys, SIZE),) * 2, (2, count, heads, SIZE)
    return [jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes]


@functools.partial(jax.jit, static_argnums=0)
def with_grads(attend, real, q, k, v, d_out):
    """The result and the gradients, of real tokens alone."""
    real = real[..., None, None]
    out, pull = jax.vjp(attend, q, k, v)
    return jnp.where(real, out, 0), *pull(jnp.where(real, d_out, 0).astype(out.dtype))


def kernel(mask, transform):
    def attend(q, k, v):
        tables = make_tables(mask, meta_of(mask), BLOCKS.tables)
        return sequence_attention(
            q, k, v, tables, transform=transform, blocks=BLOCKS, interpret=INTERPRET
        )

    return attend


def reference(mask, transform):
    meta = meta_of(mask)
    return lambda q, k, v: dense.dense_attention(q, k, v, mask(meta, meta), transform)


@pytest.mark.parametrize("name", MASKS)
def test_ranges_are_what_the_mask_says(name):
    mask, _ = MASKS[name]
    meta = meta_of(mask)
    begin, end = (np.asarray(x)[..., None] for x in mask_ranges(mask, meta))
    place = np.arange(begin.shape[2])
    seen = ((place >= begin) & (place < end)).any(axis=1)
    np.testing.assert_array_equal(seen, mask(meta, meta))


@pytest.mark.parametrize("name", MASKS)
def test_values_and_gradients_equal_dense_attention(name):
    """Rows are no multiple of a block."""
    mask, transform = MASKS[name]
    meta = meta_of(mask)
    count = meta["position"].shape[1]
    given = meta["segment"] > 0, *arrays(count, count, "float32")
    want = with_grads(reference(mask, transform), *given)
    got = with_grads(kernel(mask, transform), *given)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_bfloat16_is_as_exact_as_bfloat16_is():
    """The root mean square error is below a thousandth of the largest entry."""
    mask, transform = MASKS["isolated"]
    meta = meta_of(mask)
    count = meta["position"].shape[1]
    half = arrays(count, count, "bfloat16")
    single = [x.astype(jnp.float32) for x in half]
    want = with_grads(reference(mask, transform), meta["segment"] > 0, *single)
    got = with_grads(kernel(mask, transform), meta["segment"] > 0, *half)
    for x, y in zip(got, want, strict=True):
        error = np.asarray(x, np.float32) - np.asarray(y)
        assert np.sqrt(np.mean(error**2)) < 1e-3 * np.abs(y).max()


def test_blocks_that_no_query_sees_are_not_visited():
    """The lists have every block that is partly seen, and few others."""
    mask, _ = MASKS["isolated"]
    meta = meta_of(mask)
    seen = np.pad(np.asarray(mask(meta, meta)), ((0, 0), (0, 28), (0, 12)))
    wanted = seen.reshape(2, 8, 16, 7, 16).any((2, 4))
    tables = make_tables(mask, meta, RangeBlocks(16, 16))
    for visits, blocks in ((tables.by_query, wanted), (tables.by_key, wanted.swapaxes(1, 2))):
        listed = np.zeros(blocks.shape, bool)
        for row, i in np.ndindex(blocks.shape[:2]):
            listed[row, i, visits.order[row, i, : visits.count[row, i]]] = True
        assert (listed >= blocks).all()
        assert listed.sum() <= blocks.sum() + 8


@pytest.mark.parametrize("lost", ["by_query", "by_key"])
def test_a_block_left_out_by_mistake_is_noticed(lost):
    mask, transform = MASKS["isolated"]
    meta = meta_of(mask)
    count = meta["position"].shape[1]
    tables = make_tables(mask, meta, BLOCKS.tables)
    visits = getattr(tables, lost)
    fewer = visits._replace(count=jnp.maximum(visits.count - 1, 0))

    def attend(tables, q, k, v):
        return sequence_attention(
            q, k, v, tables, transform=transform, blocks=BLOCKS, interpret=INTERPRET
        )

    given = meta["segment"] > 0, *arrays(count, count, "float32")
    want = with_grads(functools.partial(attend, tables), *given)
    got = with_grads(functools.partial(attend, tables._replace(**{lost: fewer})), *given)
    assert max(np.abs(x - y).max() for x, y in zip(got, want, strict=True)) > 1e-2


@pytest.mark.parametrize("window", [None, 40])
def test_prefill_equals_attention_to_the_whole_cache(window):
    """Chunks at different places of caches that hold NaN behind them."""
    capacity, count = 256, 40
    q, k, v, _ = arrays(count, capacity, "float32")
    positions = jnp.array([[0], [150]], jnp.int32) + jnp.arange(count, dtype=jnp.int32)
    mask = dense.in_window(dense.chain_distances(positions, capacity), window)
    want = dense.dense_attention(q, k, v, mask)
    behind = -(-(positions[:, -1:] + 1) // 64) * 64 <= jnp.arange(capacity)
    broken = jnp.where(behind[:, None, :, None], jnp.nan, k)
    got = prefill_attention(q, broken, v, positions, window=window, interpret=INTERPRET)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_wide_block_visits_what_its_queries_see():
    """Queries that see nothing widen no block's range."""
    mask = Causal()
    segment = np.repeat([[0, 3]], [8, 24], axis=1)
    meta = {"segment": segment, "position": np.arange(32)[None] * (segment > 0)}
    by_query, by_key = visits_of(mask_ranges(mask, meta), 32, 16, 8)
    assert by_query.count.tolist() == [[1, 3]]
    assert by_query.order[0, 1, :3].tolist() == [1, 2, 3]
    assert by_key.count.tolist() == [[0, 2, 1, 1]]


def test_a_gpu_runs_it_on_each_device(monkeypatch):
    calls = []

    def run(*args, **options):
        calls.append(args)
        return sequence_attention(*args, **options, interpret=INTERPRET)

    monkeypatch.setattr(range_kernel, "platform", lambda: WITH_KERNEL)
    monkeypatch.setattr(range_kernel, "sequence_attention", run)
    mask, _ = MASKS["isolated"]
    meta = meta_of(mask)
    count = meta["position"].shape[1]
    mesh = jax.make_mesh((1, 1), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    ours = long_attention(mask, meta, ScoreTransform(), 2, rows)
    given = meta["segment"] > 0, *arrays(count, count, "float32")
    want = with_grads(reference(mask, ScoreTransform()), *given)
    for x, y in zip(with_grads(ours, *given), want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    assert len(calls) == 1
    # Heads of other sizes go block by block.
    narrow = [x[..., :8] for x in given[1:4]]
    assert jax.eval_shape(ours, *narrow).shape == narrow[0].shape
    assert len(calls) == 1


def test_what_the_kernels_cannot_do_is_left_to_others(monkeypatch):
    cache = jax.ShapeDtypeStruct((1, 2, 256, 64), jnp.bfloat16)
    plain = ScoreTransform()
    monkeypatch.setattr(range_kernel, "platform", lambda: CPU)
    assert not range_kernel.supports_prefill(256, plain, cache)
    assert not range_kernel.supports_sequences(Causal(), plain)
    monkeypatch.setattr(range_kernel, "platform", lambda: WITH_KERNEL)
    assert range_kernel.supports_prefill(256, plain, cache)
    assert range_kernel.supports_sequences(Causal(), plain)
    assert not range_kernel.supports_sequences(Causal(), ScoreTransform(sinks=True))
    assert not range_kernel.supports_prefill(256, ScoreTransform(alibi=True), cache)
    assert not range_kernel.supports_prefill(64, plain, cache)  # a narrow pass
    odd = jax.ShapeDtypeStruct((1, 2, 256, 80), jnp.bfloat16)
    assert not range_kernel.supports_prefill(256, plain, odd)
    codes = QuantizedKV(jnp.zeros((1, 2, 256, 64), jnp.int8), jnp.ones((1, 2, 256, 1)))
    assert not range_kernel.supports_prefill(256, plain, codes)
    assert not supports_ranges(lambda query, key: Causal(3)(query, key))
