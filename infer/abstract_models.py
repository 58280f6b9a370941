"""Models and rounds of shapes only, which the tools lower and compile for devices they lack."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding

import specjax as sj
from specjax import lm
from specjax.core import loop
from specjax.core.mesh import AXES, specs_of
from specjax.models import ModelConfig, fuse, param_shapes
from specjax.models.placement import param_specs, split_layers
from specjax.models.quantization import quantize_params
from specjax.models.sharding import split_config
from specjax.runtime.engine import Engine

SAMPLED = sj.Sampling(0.8, top_p=0.9)
CHUNK = 128  # of the prefill whose result's shapes a round starts from; any will do


def mesh_over(devices: list[jax.Device], data: int = 1, model: int = 1) -> Mesh:
    """A mesh of the first ``data · model`` devices of a topology."""
    shape = data, model
    auto = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=auto, devices=devices[: math.prod(shape)])


def abstract_model(
    cfg: ModelConfig,
    mesh: Mesh,
    *,
    layers: int | None = None,
    quantize: str | None = None,
    pass_width: int | None = None,
    cache_dtype: str | None = None,
) -> sj.LM:
    """A model of shapes only, in bfloat16 and split over the mesh; ``layers``: so many alone."""
    count = mesh.shape["model"]
    if layers:
        cfg = cfg.first_layers(min(cfg.num_layers, layers))

    def layout(params):
        params = fuse(params)
        if quantize:
            params = quantize_params(cfg, params, quantize, jnp.dtype(jnp.bfloat16))
        return split_layers(cfg, params, count)

    def placed(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), param_shapes(cfg))
    fused = jax.eval_shape(layout, shapes)
    params = jax.tree.map(placed, fused, param_specs(cfg, fused, count))
    width = lm.resolve_pass_width(pass_width)
    config = split_config(cfg, count)
    return sj.LM(config, params, None, (2,), cfg.vocab_size, "shapes", mesh, width, cache_dtype)


def lower_rounds(
    engine: Engine, rows: int, capacity: int, mesh: Mesh, sampling: sj.Sampling = SAMPLED
) -> jax.stages.Lowered:
    """The lowered loop of rounds."""
    shaped = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    inputs = engine.inputs(sampling, rows, range(rows))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    prefill = loop.prefill_prompts(engine.method, CHUNK, False)
    lengths = shaped((rows,))
    filled = jax.eval_shape(prefill, inputs, shaped((rows, capacity)), lengths, lengths, keys)

    def placed(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.tree.map(placed, filled, specs_of(filled))
    return loop.run_rounds(engine.method).lower(inputs, state, shaped(()))
