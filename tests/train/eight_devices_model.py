"""Layers that are split over eight simulated devices; test_placement.py runs this file."""

import dataclasses
import functools
import re

import jax
import pytest
from eight_devices_sequence import (
    IDS,
    MODEL,
    B,
    T,
    batch_of,
    require_the_same,
    use_blocks,
)

from specjax.models import init_params, param_shapes, sharding
from train.config import Optim
from train.engine.optim import make_optimizer
from train.engine.placement import make_placement
from train.lm.losses import data_loss
from train.sdsat.insertion import Insertion, mixed_row
from train.sdsat.losses import SdsatObjective, sdsat_loss, weigh
from train.sdsat.memory import Parts, lowered_step


@pytest.fixture(autouse=True)
def all_weights_are_split(monkeypatch):
    monkeypatch.setattr(sharding, "SMALLEST_SHARED", 32)


@pytest.mark.parametrize(
    ("case", "fsdp", "sequence", "model", "backend"),
    [
        ("lm", 2, 1, 2, "dense"),
        ("lm", 2, 1, 4, "blockwise"),
        ("distillation", 1, 1, 4, "dense"),
        ("isolated", 2, 1, 2, "dense"),
        ("improved", 2, 1, 4, "blockwise"),
        ("isolated", 1, 2, 4, "blockwise"),
        ("probe", 2, 1, 4, "dense"),
        ("head", 2, 1, 4, "dense"),
        ("head", 1, 2, 2, "blockwise"),
    ],
)
def test_split_layers_give_the_loss_and_gradients_of_one_device(
    case, fsdp, sequence, model, backend, monkeypatch
):
    if backend == "blockwise":
        use_blocks(monkeypatch)
    require_the_same(case, make_placement(fsdp, B, None, sequence, model).of_models(MODEL))


def test_all_devices_may_share_every_row():
    require_the_same("isolated", make_placement(1, B, jax.devices()[:4], 1, 4).of_models(MODEL))


def test_a_device_gathers_and_multiplies_its_part_of_a_layer_alone():
    columns, vocabulary = 40, 144  # numbers that no row or token has
    cfg = dataclasses.replace(MODEL, vocab_size=vocabulary, intermediate_size=columns)
    placement = make_placement(2, B, None, 1, 2).of_models(cfg)
    params = placement.place_state(init_params(cfg, jax.random.key(0)))
    loss = data_loss(cfg, rows=placement.row_sharding(0))
    rows = placement.place_rows(batch_of(), 0)
    step = jax.jit(jax.grad(lambda *arguments: loss(*arguments)[0]))
    text = step.lower(params, {}, rows).compile().as_text()
    products = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text)
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    for shapes in (products, gathered):
        sizes = {int(size) for shape in shapes for size in shape.split(",")}
        assert {columns // 2, vocabulary // 2} <= sizes
        assert not {columns, vocabulary} & sizes


@pytest.mark.parametrize("model", [2, 4])
def test_a_device_keeps_its_part_of_what_a_block_reads(model):
    """Of a whole step with remat and a scan, where one array has the inputs of all blocks."""
    layers, width = 5, 40  # numbers that nothing else has
    cfg = dataclasses.replace(MODEL, num_layers=layers, hidden_size=width)
    objective = SdsatObjective("basic", len(IDS), remat=True, scan=True)
    placement = make_placement(2, B, None, 1, model).of_models(cfg)
    rows = batch_of(functools.partial(mixed_row, Insertion(IDS, rate=0.2)))
    parts = Parts(
        loss=sdsat_loss(cfg, objective, placement.row_sharding(0)),
        optimizer=make_optimizer(Optim(batch_size=B)),
        weigh=functools.partial(weigh, objective),
        trainable=param_shapes(cfg),
        frozen={},
        batches=jax.eval_shape(lambda: jax.tree.map(lambda x: x[None], rows)),
        sequences=1,
    )
    text = lowered_step(parts, placement).compile().as_text()
    kept = re.findall(rf"f32\[{layers},(\d+),(\d+),{width}\]", text)
    assert {(B * model // 8, T // model)} == {(int(b), int(t)) for b, t in kept}
