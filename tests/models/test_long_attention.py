"""Attention by blocks equals dense attention, in value and gradient, and skips unseen blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from specjax.models import ModelConfig, hidden_states, init_params
from specjax.models.attention import splash, splash_windows
from specjax.models.attention.dense import (
    Causal,
    Isolated,
    ScoreTransform,
    dense_attention,
    distances,
)
from specjax.models.attention.flash import FlashBlocks, find_blocks, flash_attention
from specjax.models.attention.long_sequences import long_attention
from train.sdsat.insertion import Insertion, append_windows

BLOCK = 8
CLEAN, APPENDED = 39, 12  # clean tokens of a row, and positions after them for windows


def packed_rows(lengths=((17, 9, 8), (39,))):
    """Metadata of rows: documents of these lengths, then padding, then adaptive windows."""
    rows = []
    for row, documents in enumerate(lengths):
        segments = np.repeat(np.arange(1, len(documents) + 1), documents)
        positions = np.concatenate([np.arange(n) for n in documents])
        pad = (0, CLEAN - len(segments))
        segments, positions = np.pad(segments, pad), np.pad(positions, pad)
        blank = np.zeros(CLEAN, np.int64)
        clean = {"tokens": blank, "labels": blank, "segments": segments, "positions": positions}
        starts, counts = np.array([0, 5, 6, 30 - row]), np.array([1, 4, 2, 3])
        rows.append(append_windows(clean, starts, counts, APPENDED, Insertion((7,) * 4)))
    names = {"segments": "segment", "positions": "position", "windows": "windows"}
    names["starts"] = "starts"
    return {ours: np.stack([row[name] for row in rows]) for name, ours in names.items()}


def tokens(meta, count):
    return {name: x[:, :count] for name, x in meta.items()}


def parts(count, heads=4, key_heads=2, size=8, dtype=np.float32):
    """Random queries, keys, values and cotangent of two rows."""
    generator = np.random.Generator(np.random.Philox(0))
    shapes = (2, count, heads, size), *((2, key_heads, count, size),) * 2, (2, count, heads, size)
    return [jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes]


def dense(mask, meta, transform):
    distance = distances(meta, meta) if transform.alibi else None
    return lambda q, k, v: dense_attention(q, k, v, mask(meta, meta), transform, distance)


def flash(mask, meta, transform, **how):
    return lambda q, k, v: flash_attention(
        q, k, v, meta, meta, mask, transform=transform, block=BLOCK, **how
    )


def agree(attends, meta, q, k, v, d_out, close):
    """Checks that both give equal results and gradients at real tokens, finite ones at padding."""
    real = (meta["segment"] > 0)[..., None, None]

    @jax.jit
    def run(q, k, v):
        results = []
        for attend in attends:
            out, pull = jax.vjp(attend, q, k, v)
            results.append((jnp.where(real, out, 0), *pull(jnp.where(real, d_out, 0)), out))
        return results

    want, got = run(q, k, v)
    assert np.isfinite(np.asarray(got[-1], np.float32)).all()
    for x, y in zip(want[:-1], got[:-1], strict=True):
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (y, x)), atol=close)


CASES = {
    "causal": (Causal(), ScoreTransform()),
    "sliding": (Causal(window=5), ScoreTransform(scale=0.3)),
    "isolated": (Isolated(clean=CLEAN), ScoreTransform()),
    "isolated, sliding": (Isolated(clean=CLEAN, window=7), ScoreTransform()),
    "softcap": (Causal(), ScoreTransform(softcap=1.5)),
    "alibi": (Isolated(clean=CLEAN), ScoreTransform(softcap=2.0, alibi=True)),
    "any function": (lambda query, key: Causal(3)(query, key), ScoreTransform()),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_agree_with_dense_attention(name):
    mask, transform = CASES[name]
    count = CLEAN + APPENDED * isinstance(mask, Isolated)
    meta = tokens(packed_rows(), count)
    both = dense(mask, meta, transform), flash(mask, meta, transform)
    agree(both, meta, *parts(count), close=1e-5)


def halved(mask, meta, attend, count):
    """Yields (ours in bfloat16, dense attention in float32) for the result and each gradient."""
    q, k, v, d_out = parts(count, dtype=jnp.bfloat16)
    single = (x.astype(jnp.float32) for x in (q, k, v))
    real = (meta["segment"] > 0)[..., None, None]

    @functools.partial(jax.jit, static_argnums=0)
    def run(attend, *args):
        out, pull = jax.vjp(attend, *args)
        return jnp.where(real, out, 0), *pull(jnp.where(real, d_out, 0).astype(out.dtype))

    want, got = run(dense(mask, meta, ScoreTransform()), *single), run(attend, q, k, v)
    for pair in zip(got, want, strict=True):
        yield tuple(np.asarray(x, np.float32) for x in pair)


def test_blocks_in_bfloat16_are_as_exact_as_bfloat16_is():
    """The relative error is below 2⁻⁷; a bfloat16 has 8 significant bits."""
    meta = tokens(packed_rows(), CLEAN)
    for ours, theirs in halved(Causal(), meta, flash(Causal(), meta, ScoreTransform()), CLEAN):
        assert np.linalg.norm(ours - theirs) < 2**-7 * np.linalg.norm(theirs)


def test_blocks_that_no_query_sees_are_skipped():
    """Blocks that no query sees hold NaN, which would show in the result even with weight 0."""
    meta = tokens(packed_rows(((16, 23), (16, 23))), CLEAN)
    blocks = find_blocks(Causal(), meta, meta, BLOCK)
    met = [[0], [0, 1], [2], [2, 3], [2, 3, 4]]  # whole blocks first; the last one ends in padding
    assert [row[:n].tolist() for row, n in zip(blocks.order, blocks.seen, strict=True)] == met
    assert blocks.whole.tolist() == [0, 1, 0, 1, 0]

    (q, k, v, d_out), later = parts(CLEAN), slice(16, None)
    hidden = [x.at[:, :, :16].set(jnp.nan) for x in (k, v)]

    @jax.jit
    def run(k, v):
        out, pull = jax.vjp(flash(Causal(), meta, ScoreTransform()), q, k, v)
        d_q, d_k, d_v = pull(d_out.at[:, :16].set(0))
        return out[:, later], d_q[:, later], d_k[:, :, later], d_v[:, :, later]

    for x, y in zip(run(k, v), run(*hidden), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("lost", [(1, "part"), (3, "whole")])
def test_a_block_left_out_by_mistake_is_noticed(lost):
    meta = tokens(packed_rows(((16, 23), (16, 23))), CLEAN)
    blocks, (i, kind) = find_blocks(Causal(), meta, meta, BLOCK), lost
    if kind == "part":
        wrong = blocks._replace(seen=blocks.seen.at[i].add(-1))
    else:
        order = blocks.order.at[i].set(jnp.roll(blocks.order[i], -1))
        wrong = FlashBlocks(order, blocks.whole.at[i].add(-1), blocks.seen.at[i].add(-1))
    both = [flash(Causal(), meta, ScoreTransform(), blocks=table) for table in (blocks, wrong)]
    with pytest.raises(AssertionError):
        agree(both, meta, *parts(CLEAN), close=1e-2)


def test_gradients_need_memory_for_one_block_of_scores():
    """Apart from one block of scores, only a few copies of the arguments are stored."""
    n, heads, size, block = 4096, 8, 32, 512
    q = jax.ShapeDtypeStruct((1, n, heads, size), jnp.float32)
    k = jax.ShapeDtypeStruct((1, heads, n, size), jnp.float32)
    meta = {"position": np.arange(n)[None], "segment": np.ones((1, n), np.int32)}

    def total(q, k, v):
        return jnp.sum(flash_attention(q, k, v, meta, meta, Causal(), block=block) ** 2)

    step = jax.jit(jax.grad(total, (0, 1, 2))).lower(q, k, k).compile()
    scores, arguments = 4 * block**2, 3 * 4 * n * heads * size
    assert step.memory_analysis().temp_size_in_bytes < 4 * scores + 4 * arguments


# The TPU kernel, run by Pallas's interpreter, with blocks that do not divide the rows.
BLOCKS, WINDOW_BLOCKS = (
    splash.SplashBlocks(128, 128, 256, 128),
    splash.SplashBlocks(128, 256, 512, 128),
)
kernel = functools.partial(splash.splash_attention, blocks=BLOCKS, interpret=True)


@pytest.mark.parametrize(
    "window, transform", [(70, ScoreTransform()), (None, ScoreTransform(0.3, softcap=1.5))]
)
def test_the_tpu_kernel_agrees_with_dense_attention(window, transform):
    """Rows have packed documents and padding."""
    lengths = (100, 50, 50)
    segments = np.repeat([[1, 2, 0], [1, 2, 3]], lengths, axis=1)
    positions = np.concatenate([np.arange(n) for n in lengths])[None].repeat(2, 0)
    meta = {"segment": segments, "position": positions}

    def attend(q, k, v):
        return kernel(q, k, v, segments, window=window, transform=transform)

    both = dense(Causal(window), meta, transform), attend
    agree(both, meta, *parts(200, size=8), close=1e-5)


def long_rows(clean, appended, longest):
    """Two rows of documents, the second padded, followed by as many windows as fit."""
    rows, generator = [], np.random.Generator(np.random.Philox(1))
    for documents in ((clean // 2, clean - clean // 2), (clean // 3, clean // 2)):
        segments = np.repeat(np.arange(1, 3), documents)
        positions = np.concatenate([np.arange(n) for n in documents])
        blank, pad = np.zeros(clean, np.int64), (0, clean - len(segments))
        row = {"segments": np.pad(segments, pad), "positions": np.pad(positions, pad)}
        row |= {"tokens": blank, "labels": blank}
        counts = generator.integers(1, longest + 1, appended // longest - 2)
        starts = np.sort(generator.integers(0, len(segments) - longest, len(counts)))
        rows.append(append_windows(row, starts, counts, appended, Insertion((7,) * longest)))
    names = {"segments": "segment", "positions": "position", "windows": "windows"}
    names["starts"] = "starts"
    return {ours: np.stack([row[name] for row in rows]) for name, ours in names.items()}


WINDOWED = Isolated(clean=500, longest=5)


def windowed(meta, transform):
    """Attention under :data:`WINDOWED` by the kernel, with blocks that do not divide the rows."""
    windows = splash_windows.make_window_tables(WINDOWED, meta, WINDOW_BLOCKS)
    how = {"blocks": WINDOW_BLOCKS, "interpret": True}

    def attend(q, k, v):
        segments = meta["segment"]
        own = (x[:, :, :500] for x in (k, v))
        clean = kernel(q[:, :500], *own, segments[:, :500], transform=transform)
        behind = splash_windows.window_attention(
            q[:, 500:], k, v, segments, windows, mask=WINDOWED, transform=transform, **how
        )
        return jnp.concatenate([clean, behind], axis=1)

    return attend


@pytest.mark.parametrize("transform", [ScoreTransform(), ScoreTransform(0.3, softcap=1.5)])
def test_the_tpu_kernel_of_windows_agrees_with_dense_attention(transform):
    """Windows that cross blocks and documents that begin behind them, over several blocks."""
    meta = long_rows(500, 300, 5)
    both = dense(WINDOWED, meta, transform), windowed(meta, transform)
    agree(both, meta, *parts(800), close=1e-5)


def test_windows_in_bfloat16_are_as_exact_as_bfloat16_is():
    """The root mean square error is below a thousandth of the largest entry."""
    meta = long_rows(500, 300, 5)
    for ours, theirs in halved(WINDOWED, meta, windowed(meta, ScoreTransform()), 800):
        assert np.sqrt(np.mean((ours - theirs) ** 2)) < 1e-3 * abs(theirs).max()


def test_a_block_that_no_window_sees_is_skipped():
    """The tables hold every block that is partly seen, and at most two more.

    A position that no window uses sees itself.
    """
    meta, block = long_rows(500, 300, 5), 128
    seen = np.array(WINDOWED(meta, meta)[:, 500:]) | np.eye(300, 800, 500, bool)
    seen = np.pad(seen, ((0, 0), (0, 84), (0, 224)))
    windows = splash_windows.make_window_tables(WINDOWED, meta, WINDOW_BLOCKS)
    for table, wide in ((windows.forward, 256), (windows.backward, 512)):
        wanted = seen.reshape(2, 3, block, -1, wide).any((2, 4))
        assert (np.asarray(table) >= wanted).all()
        assert np.asarray(table).sum() <= wanted.sum() + 2


def test_the_kernel_supports_windows_whose_codes_fit_an_int32():
    def takes(count, **how):
        return splash_windows.supports_windows(Isolated(**how), ScoreTransform(), count)

    assert takes(16384 + 5176, clean=16384, longest=5)
    assert not takes(16384 + 5176, clean=16384)
    assert not takes(16384 + 5176, clean=16384, longest=5, window=4096)
    assert not takes(32768 + 10248, clean=32768, longest=5)


@pytest.mark.parametrize("backend, longest", [("tpu", 0), ("tpu", 4), ("gpu", 4)])
def test_every_backend_runs_isolated_windows(monkeypatch, backend, longest):
    """On a TPU clean tokens use the kernel. So do windows if their length is known.

    Everything else goes through our blocks. All of it runs over a mesh.
    """
    clean_calls = []
    window_calls = []
    make_window_tables = splash_windows.make_window_tables
    window_attention = splash_windows.window_attention

    def run_clean(*args, **options):
        clean_calls.append(args)
        return kernel(*args, **options)

    def run_windows(*args, **options):
        window_calls.append(args)
        return window_attention(*args, **options, blocks=WINDOW_BLOCKS, interpret=True)

    def small_tables(*args):
        return make_window_tables(*args, WINDOW_BLOCKS)

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(splash, "splash_attention", run_clean)
    monkeypatch.setattr(splash_windows, "make_window_tables", small_tables)
    monkeypatch.setattr(splash_windows, "window_attention", run_windows)
    meta, mask = packed_rows(), Isolated(clean=CLEAN, longest=longest)
    mesh = jax.make_mesh((1, 1), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    ours = long_attention(mask, meta, ScoreTransform(), 2, rows)
    count = CLEAN + APPENDED
    agree((dense(mask, meta, ScoreTransform()), ours), meta, *parts(count), close=1e-5)
    assert [args[0].shape[1] for args in clean_calls] == [CLEAN] * (backend == "tpu")
    by_kernel = backend == "tpu" and longest > 0
    assert [args[0].shape[1] for args in window_calls] == [APPENDED] * by_kernel


@pytest.mark.parametrize("scan", [False, True])
def test_attention_may_be_kept_where_blocks_are_recomputed(scan):
    """The gradients are the same, with one loop over blocks of keys less."""
    cfg = ModelConfig.llama(
        vocab_size=11, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8
    )
    params = init_params(cfg, jax.random.key(0))
    at = np.arange(20)[None]

    def gradients(remat):
        def loss(params):
            how = {"backend": "blockwise", "remat": remat, "scan": scan}
            return (
                hidden_states(cfg, params, at % 11, at, np.ones_like(at), **how).hidden ** 2
            ).sum()

        run = jax.jit(jax.grad(loss)).lower(params)
        return run.compile()(params), run.as_text().count("stablehlo.while")

    (want, loops), (got, fewer) = gradients(True), gradients("attention")
    assert fewer < loops
    for x, y in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
