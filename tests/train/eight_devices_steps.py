"""The compiled training step on eight simulated devices; test_placement.py runs this file."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from specjax.models import ModelConfig, param_shapes
from train.config import Optim
from train.engine.optim import make_optimizer
from train.engine.placement import make_placement
from train.sdsat.losses import SdsatObjective, sdsat_loss, weigh
from train.sdsat.memory import Parts, lowered_step

# V does not divide by 8, as CodeLlama's vocabulary with one id more does not.
B, T, APPENDED, D, KEYS, INNER, V = 8, 48, 24, 64, 32, 176, 417
MODEL = ModelConfig.llama(
    vocab_size=V,
    hidden_size=D,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=INNER,
    max_position=256,
    tie_embeddings=False,
    eos_ids=(2,),
)

GATHERED, REDUCED = re.compile(r"= f32\[([\d,]+)\]\S* all-gather"), re.compile(r".* all-reduce.*")


def program(loss, fsdp):
    """The compiled step of a loss as text, with weights sharded over ``fsdp`` devices."""
    objective = SdsatObjective(loss, 5, 0.0 if loss == "basic" else 1.0, remat=True)
    placement = make_placement(fsdp, B)
    tokens = T + APPENDED if loss == "isolated" else T
    names = ["tokens", "labels", "segments", "positions", "index"]
    names += ["windows", "starts"] if loss == "isolated" else ["mixed"]
    batch = {name: jax.ShapeDtypeStruct((1, B, tokens), jnp.int32) for name in names}
    if loss == "isolated":
        batch["sources"] = jax.ShapeDtypeStruct((1, B, APPENDED), jnp.int32)
    parts = Parts(
        loss=sdsat_loss(MODEL, objective, placement.row_sharding(0)),
        optimizer=make_optimizer(Optim(batch_size=B)),
        weigh=functools.partial(weigh, objective),
        trainable=param_shapes(MODEL),
        frozen={},
        batches=batch,
        sequences=1,
    )
    return lowered_step(parts, placement).compile().as_text()


@pytest.mark.parametrize("fsdp", [1, 8])
@pytest.mark.parametrize("loss", ["basic", "improved", "isolated"])
def test_every_device_works_on_its_own_rows(loss, fsdp):
    """Products have one device's tokens and whole weights, and no activations are exchanged."""
    text = program(loss, fsdp)
    widths = (D, KEYS, INNER, V)
    tokens = {"basic": (T,), "improved": (2 * T, T), "isolated": (T + APPENDED, T, APPENDED)}[loss]
    products = set(re.findall(r"= f32\[(\d+),(\d+)\]\S* dot\(", text))
    assert len(products) > 5
    for rows, columns in products:
        assert int(rows) in (*tokens, *widths) and int(columns) in widths
    # V does not divide, so the table is split by columns, and looked-up rows are exchanged.
    moves = re.findall(r".* (?:all-to-all|collective-permute)(?:-start)?\(.*", text)
    assert all("_take" in move for move in moves) and len(moves) == (0 if fsdp == 1 else 2)
    weights = {frozenset(shape) for shape in ((D,), (D, KEYS), (D, INNER), (D, V))}
    gathered = [frozenset(map(int, shape.split(","))) for shape in GATHERED.findall(text)]
    assert set(gathered) <= weights and bool(gathered) == (fsdp == 8)
    # The output table is gathered per sum of the loss, forward and backward, and not per chunk.
    assert gathered.count(frozenset((D, V))) <= 4
    assert not any(f"[{rows},{V}]" in line for rows in tokens for line in REDUCED.findall(text))
