"""The memory of a training step in bytes per device, before any weight is read.

There are two answers: an estimate by formulas, and the compiler's account of the step at its real
shapes, compiled ahead of time. Deep models are compiled at two small depths and extrapolated,
because every block takes the same memory.

Axes: B rows of a micro-batch, T tokens of a row.
"""

from __future__ import annotations

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
from train.engine.placement import Placement
from train.engine.shares import Shares

GIB = 2**30
DEEPEST = 4  # blocks; deeper models are extrapolated
# HBM of one device in GiB, by JAX's name of its kind (vendors' data sheets).
DEVICE_GIB = {"TPU v4": 32, "TPU v5 lite": 16, "TPU v5": 95, "TPU v6 lite": 32}


class Parts(NamedTuple):
    """A step as shapes: everything that :func:`train.engine.loop.make_step` takes."""

    loss: LossFn
    optimizer: optax.GradientTransformation
    weigh: Callable[[dict], dict]
    trainable: Any  # trees of ShapeDtypeStruct
    frozen: Any
    batches: dict  # [accumulate, B, ...] each
    sequences: int  # sequences per row in the forward pass: 2 for a clean and a mixed one


class Compiled(NamedTuple):
    """The compiler's account of one step on one device, in bytes.

    ``layers`` are the depths that were compiled; two if the result is extrapolated.
    """

    arguments: int  # params, optimizer state, batch
    temporaries: int
    fresh: int  # results that reuse no argument's memory
    layers: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(arguments, temporaries, fresh)."""
        return self[:3]

    @property
    def total(self) -> int:
        return sum(self.sizes)


def compile_step(parts: Parts, placement: Placement, layers: int) -> Compiled:
    """The memory of a step on the placement's devices, for a model with this many ``layers``."""
    sizes = lowered_step(parts, placement).compile().memory_analysis()
    fresh = max(0, sizes.output_size_in_bytes - sizes.alias_size_in_bytes)
    return Compiled(sizes.argument_size_in_bytes, sizes.temp_size_in_bytes, fresh, (layers,))


def lowered_step(parts: Parts, placement: Placement) -> jax.stages.Lowered:
    """The step for the placement's devices; nothing is allocated on them."""
    state = jax.eval_shape(parts.optimizer.init, parts.trainable)
    placed = placement.step_shardings(parts.trainable, state)
    step = make_step(parts.loss, parts.optimizer, parts.weigh, placed)
    rows = jax.tree.map(lambda x: _with_sharding(x, placement.row_sharding(1)), parts.batches)
    trees = (parts.trainable, state, parts.frozen)
    if placed:
        trees = jax.tree.map(_with_sharding, trees, placement.shardings(trees))
    return step.lower(*trees, rows)


def _with_sharding(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def compile_deep(
    model: ModelConfig, compile_at: Callable[[ModelConfig], Compiled], scan: bool = False
) -> Compiled:
    """``compile_at(model)``, for deep models extrapolated from two shallow copies.

    With ``scan`` one block is compiled for all, so the whole model compiles as fast as a shallow
    one, and nothing is extrapolated.
    """
    # Layers that alternate (a pattern of sliding windows) are one group.
    group = period(model.windows)
    few = 2 * group
    more = 3 * group
    if scan or model.num_layers <= max(DEEPEST, more) or model.num_layers % group:
        return compile_at(model)

    low = compile_at(shallow(model, few))
    high = compile_at(shallow(model, more))
    steps = (model.num_layers - few) / group
    sizes = [round(a + steps * (b - a)) for a, b in zip(low.sizes, high.sizes, strict=True)]
    return Compiled(*sizes, (few, more))


def shallow(model: ModelConfig, layers: int) -> ModelConfig:
    """The model with its first ``layers`` blocks only."""
    return model.first_layers(layers)


def estimate(
    model: ModelConfig, parts: Parts, shares: Shares, devices: int, dtype: str, remat: Remat
) -> dict[str, int]:
    """Bytes per device by purpose; their sum is roughly what the step needs.

    Args:
      shares: how the devices share the params.
      devices: all devices. Those along ``model`` share heads and columns, the others the rows.
      dtype: of the forward pass.
      remat: blocks are recomputed in the backward pass, so only their inputs are kept; with
        ``attention`` also the attention outputs of long sequences.
    """
    item = jnp.dtype(dtype).itemsize
    trained = shares.bytes_per_device(parts.trainable)
    state = shares.bytes_per_device(jax.eval_shape(parts.optimizer.init, parts.trainable))
    frozen = shares.bytes_per_device(parts.frozen)
    # The params in the dtype of the forward pass, beside the float32 ones.
    copied = 0 if dtype == "float32" else (trained + frozen) * item // 4
    _, rows, length = parts.batches["tokens"].shape
    tokens = parts.sequences * rows * length * shares.model // devices
    block = tokens * _block_values(model, length, shares.model) * item
    inputs = tokens // shares.model * model.hidden_size * item
    if remat == "attention" and length >= BLOCKWISE_FROM:
        inputs += tokens * model.num_heads // shares.model * (model.head_dim * item + 4)
    if remat:
        activations = model.num_layers * inputs + block
    else:
        activations = model.num_layers * block
    return {
        "params": trained + frozen,
        "optimizer": state,
        "gradients": 2 * trained,  # the sum of the step, and those of a micro-batch
        "compute_copy": copied,
        "gathered": _gathered(model) // shares.model * item if shares.fsdp > 1 else 0,
        "activations": activations,
        "logits": 3 * min(CHUNK, tokens) * -(-model.vocab_size // shares.model) * 4,
    }


def evaluation(model: ModelConfig, parts: Parts, shares: Shares, dtype: str) -> int:
    """Bytes of the device that decodes held-out prompts during training.

    Besides its share of the training state, it holds the whole model in the dtype of the forward
    pass, and a second time in the layout of decoding.
    """
    moments = jax.eval_shape(parts.optimizer.init, parts.trainable)
    state = shares.bytes_per_device((parts.trainable, parts.frozen, moments))
    return state + 2 * num_params(model) * jnp.dtype(dtype).itemsize


def _gathered(model: ModelConfig) -> int:
    """Parameters that a device gathers at a time: those of one block, and of the LM head."""
    table = model.vocab_size * model.hidden_size
    tables = table if model.tie_embeddings else 2 * table
    return (num_params(model) - tables) // model.num_layers + table


def _block_values(model: ModelConfig, keys: int, shares: int) -> int:
    """Values per token that the backward pass of one block reads on one of ``shares`` devices.

    These are the inputs of norms and matrix products. Dense attention adds two values per key:
    the input of its softmax, and its output.
    """
    attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    inner = model.intermediate_size * (3 if model.gated_mlp else 2)
    dense = 2 * model.num_heads * keys if keys < BLOCKWISE_FROM else 0
    return 4 * model.hidden_size + (attention + inner + dense) // shares
