"""Rows that are split over eight simulated devices; test_placement.py runs this file."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from specjax.models import ModelConfig, forward_pass, init_params
from specjax.models.attention import long_sequences
from specjax.models.config import ExpertsConfig
from specjax.models.families.head_config import HeadConfig
from train.data.packing import IGNORE
from train.engine.placement import make_placement
from train.head import losses as head_losses
from train.head.losses import HeadObjective, head_loss
from train.lm.losses import data_loss, distillation_loss
from train.sdsat.insertion import Insertion, isolated_row, mixed_row, probe_row
from train.sdsat.losses import SdsatObjective, probe_loss, sdsat_loss, weigh

B, T, V = 4, 64, 61
IDS = (V - 1,) * 4  # adaptive
MODEL = ModelConfig.llama(
    vocab_size=V,
    hidden_size=16,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=24,
    max_position=256,
    tie_embeddings=False,
)


def lengths_of(row):
    """Documents of a row: they begin and end inside of the devices' parts, and on their edges."""
    return ([13, 19, 30, 2], [8, 56], [64], [31, 1, 20, 7])[row]


def packed(row):
    """A packed row; the last one ends with padding."""
    tokens = np.random.default_rng(row).integers(1, V - 1, T).astype(np.int32)
    segments = np.zeros(T, np.int32)
    positions = np.zeros(T, np.int32)
    begin = 0
    for number, length in enumerate(lengths_of(row), start=1):
        segments[begin : begin + length] = number
        positions[begin : begin + length] = np.arange(length)
        begin += length
    labels = np.full(T, IGNORE, np.int32)
    same = (segments[1:] == segments[:-1]) & (segments[1:] > 0)
    labels[:-1] = np.where(same, tokens[1:], IGNORE)
    return {"tokens": tokens, "labels": labels, "segments": segments, "positions": positions}


def batch_of(lay_out=lambda row, number: row):
    rows = [lay_out(packed(number), number) for number in range(B)]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def lm_case(rows):
    """A model with a sliding window."""
    cfg = dataclasses.replace(MODEL, sliding_window=11)
    return data_loss(cfg, rows=rows), init_params(cfg, jax.random.key(0)), {}, batch_of()


def mixture_case(rows):
    """A mixture of experts, with the loss that balances its router."""
    experts = ExpertsConfig(count=6, active=2, size=12, shared_size=8, balance=0.1)
    cfg = dataclasses.replace(MODEL, experts=experts)
    return data_loss(cfg, rows=rows), init_params(cfg, jax.random.key(0)), {}, batch_of()


def distillation_case(rows):
    loss = distillation_loss(MODEL, MODEL, 0.7, 2.0, rows=rows)
    return loss, init_params(MODEL, jax.random.key(0)), init_params(MODEL, jax.random.key(1)), None


def sdsat_case(rows, kind):
    objective = SdsatObjective(kind, len(IDS), 0.0 if kind == "basic" else 0.5, remat=True)
    lay_out = isolated_row if kind == "isolated" else mixed_row
    batch = batch_of(functools.partial(lay_out, Insertion(IDS, rate=0.2)))
    plain = sdsat_loss(MODEL, objective, rows)

    def loss(params, frozen, batch):
        weighed = weigh(objective, jax.tree.map(lambda x: x[None], batch))
        return plain(params, frozen, jax.tree.map(lambda x: x[0], weighed))

    return loss, init_params(MODEL, jax.random.key(0)), {}, batch


def probe_case(rows):
    batch = batch_of(functools.partial(probe_row, Insertion(IDS), length=4))
    return probe_loss(MODEL, 4, rows=rows), init_params(MODEL, jax.random.key(0)), {}, batch


def head_case(rows):
    cfg = HeadConfig.of(MODEL, np.arange(1, V, 2), layer_ids=(0,), own_embedding=False)
    loss = head_loss(MODEL, cfg, HeadObjective(3, 0.7, remat=True, drop_outside=True), rows)
    target = init_params(MODEL, jax.random.key(0))
    return loss, init_params(cfg, jax.random.key(1)), target, None


CASES = {
    "lm": lm_case,
    "mixture": mixture_case,
    "distillation": distillation_case,
    "improved": functools.partial(sdsat_case, kind="improved"),
    "isolated": functools.partial(sdsat_case, kind="isolated"),
    "probe": probe_case,
    "head": head_case,
}


def evaluate(case, placement):
    """(loss, count and extras; gradients) of a case on a placement's devices."""
    loss, params, frozen, batch = CASES[case](placement.row_sharding(0))
    # Larger embeddings: attention is then far from uniform.
    params = jax.tree.map(lambda x: 4 * x if x.ndim == 2 else x, params)
    batch = batch_of() if batch is None else batch

    def total(params, frozen, batch):
        first, *rest = loss(params, frozen, batch)
        return first, rest

    arguments = (
        placement.place_state(params),
        placement.place_state(frozen),
        placement.place_rows(batch, 0),
    )
    return jax.device_get(jax.jit(jax.value_and_grad(total, has_aux=True))(*arguments))


def require_the_same(case, placement):
    """Loss, what is logged and gradients of a placement are those of one device."""
    (loss, rest), gradients = evaluate(case, placement)
    one = make_placement(1, B, jax.devices()[:1])
    (expected, expected_rest), expected_gradients = evaluate(case, one)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), rest, expected_rest
    )

    def compare(ours, theirs):
        size = np.abs(theirs).max()
        assert size > 0
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * size)

    jax.tree.map(compare, gradients, expected_gradients)


def use_blocks(patched):
    """Attention by blocks of eight tokens, also of short rows."""
    patched.setattr(forward_pass, "BLOCKWISE_FROM", 16)
    patched.setattr(head_losses, "BLOCKWISE_FROM", 16)
    patched.setattr(head_losses, "QUERY_BLOCK", 3)
    patched.setattr(long_sequences, "block_size", lambda rows, groups: 8)


@pytest.mark.parametrize(
    ("case", "fsdp", "sequence", "backend"),
    [
        ("isolated", 2, 4, "dense"),
        ("head", 2, 4, "dense"),
        ("probe", 2, 4, "dense"),
        ("distillation", 1, 8, "dense"),
        ("lm", 1, 8, "blockwise"),
        ("mixture", 4, 2, "dense"),
        ("mixture", 2, 4, "dense"),
        ("improved", 2, 4, "blockwise"),
        ("isolated", 1, 8, "blockwise"),
        ("head", 1, 8, "blockwise"),
    ],
)
def test_split_rows_give_the_loss_and_gradients_of_one_device(
    case, fsdp, sequence, backend, monkeypatch
):
    if backend == "blockwise":
        use_blocks(monkeypatch)
    require_the_same(case, make_placement(fsdp, B, None, sequence))


def test_devices_hold_parts_of_rows_and_gather_keys_alone():
    """No device multiplies more than its share of the tokens with a weight."""
    placement = make_placement(1, B, None, 8)
    loss, params, frozen, batch = lm_case(placement.row_sharding(0))
    placed = placement.place_rows(batch, 0)
    assert placed["tokens"].addressable_shards[0].data.shape == (B, T // 8)
    text = jax.jit(jax.grad(lambda *a: loss(*a)[0])).lower(params, frozen, placed)
    text = text.compile().as_text()
    assert f"f32[{B * T},24]" not in text and f"f32[{B},{T},24]" not in text
    assert "all-gather" in text
