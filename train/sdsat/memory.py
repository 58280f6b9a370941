"""What a training step needs, known before any weight is read: bytes per device.

Two answers stand side by side: a table worked out by hand, and the compiler's own account of
the step at its real shapes, compiled ahead of time. Deep models are compiled at two small
depths and extrapolated: every block takes the same.

Axes: B rows of a micro-batch, T tokens of a row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from specjax.models import ModelConfig, num_params
from specjax.models.blocks import Remat
from specjax.models.config import period
from specjax.models.forward_pass import BLOCKWISE_FROM
from train.engine.loop import LossFn, make_step
from train.engine.losses import CHUNK
from train.engine.placement import Placement, shared_axis

GIB = 2**30
DEEPEST = 4  # blocks that are compiled as they are; deeper models are extrapolated
# HBM of one device in GiB, by JAX's name of its kind (vendors' data sheets).
DEVICE_GIB = {"TPU v4": 32, "TPU v5 lite": 16, "TPU v5": 95, "TPU v6 lite": 32}


class Parts(NamedTuple):
    """A step, as shapes: everything that :func:`train.engine.loop.make_step` takes."""

    loss: LossFn
    optimizer: optax.GradientTransformation
    weigh: Callable[[dict], dict]
    trainable: Any  # trees of ShapeDtypeStruct
    frozen: Any
    batches: dict  # [accumulate, B, ...] each
    sequences: int  # forward passes over a row: 2 where a clean and a mixed one run


class Compiled(NamedTuple):
    """The compiler's account of one step on one device, in bytes.

    ``layers`` are the depths that were compiled; more than one where the result is extrapolated.
    """

    arguments: int  # params, optimizer state, batch
    temporaries: int
    fresh: int  # results that reuse no argument's memory
    layers: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Of the three parts."""
        return self[:3]

    @property
    def total(self) -> int:
        return sum(self.sizes)


def compile_step(parts: Parts, placement: Placement, layers: int) -> Compiled:
    """What the step of a model with so many ``layers`` takes on the placement's devices."""
    sizes = compiled_step(parts, placement).memory_analysis()
    fresh = max(0, sizes.output_size_in_bytes - sizes.alias_size_in_bytes)
    return Compiled(sizes.argument_size_in_bytes, sizes.temp_size_in_bytes, fresh, (layers,))


def compiled_step(parts: Parts, placement: Placement) -> jax.stages.Compiled:
    """The step for the placement's devices; nothing is allocated on them."""
    state = jax.eval_shape(parts.optimizer.init, parts.trainable)
    placed = placement.of_step(parts.trainable, state)
    step = make_step(parts.loss, parts.optimizer, parts.weigh, placed)
    rows = jax.tree.map(lambda x: _at(x, placement.row_sharding(1)), parts.batches)
    trees = (parts.trainable, state, parts.frozen)
    if placed:
        trees = jax.tree.map(_at, trees, placement.shardings(trees))
    return step.lower(*trees, rows).compile()


def _at(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def compile_deep(
    model: ModelConfig, compile_at: Callable[[ModelConfig], Compiled], scan: bool = False
) -> Compiled:
    """``compile_at(model)``, or what two shallow copies of the model say about it.

    Layers that alternate (a pattern of sliding windows) count as one group. With ``scan`` one of
    them is compiled for all, so the whole model takes no longer than a shallow one.
    """
    group = period(model.windows)
    few, more = 2 * group, 3 * group
    if scan or model.num_layers <= max(DEEPEST, more) or model.num_layers % group:
        return compile_at(model)
    low, high = (compile_at(shallow(model, count)) for count in (few, more))
    steps = (model.num_layers - few) / group
    sizes = (round(a + steps * (b - a)) for a, b in zip(low.sizes, high.sizes, strict=True))
    return Compiled(*sizes, (few, more))


def shallow(model: ModelConfig, layers: int) -> ModelConfig:
    """The model with its first ``layers`` blocks alone."""
    slides = model.sliding_layers and model.sliding_layers[:layers]
    return dataclasses.replace(model, num_layers=layers, sliding_layers=slides)


def estimate(
    model: ModelConfig, parts: Parts, fsdp: int, devices: int, dtype: str, remat: Remat
) -> dict[str, int]:
    """Bytes per device by what they are for; the sum is what the step needs, roughly.

    Args:
      fsdp: devices that share one copy of the params; the rows are split over ``devices``.
      dtype: the forward pass's.
      remat: blocks are recomputed in the backward pass, so only their inputs are kept; with
        ``attention`` what comes of a long sequence's attention, too.
    """
    item = jnp.dtype(dtype).itemsize
    trained = _shared(parts.trainable, fsdp)
    state = _shared(jax.eval_shape(parts.optimizer.init, parts.trainable), fsdp)
    copied = 0 if dtype == "float32" else (trained + _shared(parts.frozen, fsdp)) * item // 4
    _, rows, length = parts.batches["tokens"].shape
    tokens = parts.sequences * rows * length // devices
    block = tokens * _block_values(model, length) * item
    inputs = tokens * model.hidden_size * item
    if remat == "attention" and length >= BLOCKWISE_FROM:
        inputs += tokens * model.num_heads * (model.head_dim * item + 4)
    kept = model.num_layers * inputs + block if remat else model.num_layers * block
    return {
        "params": trained + _shared(parts.frozen, fsdp),
        "optimizer": state,
        "gradients": 2 * trained,  # the step's sum, and the micro-batch's
        "compute_copy": copied,
        "gathered": _gathered(model) * item if fsdp > 1 else 0,
        "activations": kept,
        "logits": 3 * min(CHUNK, tokens) * model.vocab_size * 4,
    }


def evaluation(model: ModelConfig, parts: Parts, fsdp: int, dtype: str) -> int:
    """Bytes of the device that decodes held-out prompts, beside its share of the training state:
    the model as the forward pass has it, whole, and again in the layout of decoding."""
    kept = _shared(parts.trainable, fsdp) + _shared(parts.frozen, fsdp)
    kept += _shared(jax.eval_shape(parts.optimizer.init, parts.trainable), fsdp)
    return kept + 2 * num_params(model) * jnp.dtype(dtype).itemsize


def _shared(tree: Any, fsdp: int) -> int:
    """Bytes of one device's share of the tree."""

    def share(x) -> int:
        size = math.prod(x.shape) * x.dtype.itemsize
        return size // fsdp if any(shared_axis(x.shape, fsdp)) else size

    return sum(map(share, jax.tree.leaves(tree)))


def _gathered(model: ModelConfig) -> int:
    """Parameters that a device holds whole for a moment: a block's, and a table's."""
    table = model.vocab_size * model.hidden_size
    tables = table * (1 if model.tie_embeddings else 2)
    return (num_params(model) - tables) // model.num_layers + table


def _block_values(model: ModelConfig, keys: int) -> int:
    """Values per token that one block's backward pass reads.

    The inputs of its norms and products; and every key's weight where attention is dense, whose
    softmax is kept in float32 beside its input.
    """
    attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    inner = model.intermediate_size * (3 if model.gated_mlp else 2)
    dense = 2 * model.num_heads * keys if keys < BLOCKWISE_FROM else 0
    return 4 * model.hidden_size + attention + inner + dense
