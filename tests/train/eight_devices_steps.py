"""The compiled step on eight simulated devices. Run by test_placement.py, in a process that has
them."""

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
from train.sdsat.memory import Parts, compiled_step

# A vocabulary that does not divide, as CodeLlama's with one id more.
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
    """The text of a step over these losses' batches, its weights shared by ``fsdp`` devices."""
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
    return compiled_step(parts, placement).as_text()


@pytest.mark.parametrize("fsdp", [1, 8])
@pytest.mark.parametrize("loss", ["basic", "improved", "isolated"])
def test_every_device_works_on_its_own_rows(loss, fsdp):
    """Products have one device's tokens and a weight's whole width, and no activation moves."""
    text = program(loss, fsdp)
    widths = (D, KEYS, INNER, V)
    tokens = {"basic": (T,), "improved": (2 * T, T), "isolated": (T + APPENDED, T, APPENDED)}[loss]
    products = set(re.findall(r"= f32\[(\d+),(\d+)\]\S* dot\(", text))
    assert len(products) > 5
    for rows, columns in products:
        assert int(rows) in (*tokens, *widths) and int(columns) in widths
    # A table split by width, as its rows do not divide, hands its rows on to those who asked.
    moves = re.findall(r".* (?:all-to-all|collective-permute)(?:-start)?\(.*", text)
    assert all("_take" in move for move in moves) and len(moves) == (0 if fsdp == 1 else 2)
    weights = {frozenset(shape) for shape in ((D,), (D, KEYS), (D, INNER), (D, V))}
    gathered = [frozenset(map(int, shape.split(","))) for shape in GATHERED.findall(text)]
    assert set(gathered) <= weights and bool(gathered) == (fsdp == 8)
    # The output table is gathered for both passes of each of the loss's sums, not for its chunks.
    assert gathered.count(frozenset((D, V))) <= 4
    assert not any(f"[{rows},{V}]" in line for rows in tokens for line in REDUCED.findall(text))
