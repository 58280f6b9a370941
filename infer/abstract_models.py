"""Models and programs of shapes only: what a batch needs is known before any weight is read.

The tools that look at programs of other devices use them as well.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.typing import DTypeLike

import specjax as sj
from specjax import lm
from specjax.core import loop
from specjax.core.mesh import AXES, specs_of
from specjax.core.round import DraftVerify
from specjax.core.types import GrammarTables
from specjax.models import ModelConfig, fuse, param_shapes
from specjax.models.placement import param_specs, split_layers
from specjax.models.quantization import Scheme, quantize_params
from specjax.models.sharding import split_config
from specjax.runtime.engine import Engine
from specjax.runtime.grammar_rounds import longest_drafts
from specjax.runtime.grammar_stack import CLASSES, GRAMMARS, STATES

SAMPLED = sj.Sampling(0.8, top_p=0.9)
CHUNK = 128  # of the prefill whose result's shapes a round starts from; any will do


def mesh_over(devices: list[jax.Device], data: int = 1, model: int = 1) -> Mesh:
    """A mesh of the first ``data · model`` devices of a topology."""
    shape = data, model
    auto = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=auto, devices=devices[: math.prod(shape)])


def abstract_model(
    cfg: ModelConfig,
    mesh: Mesh | None,
    *,
    layers: int | None = None,
    quantize: Scheme | None = None,
    pass_width: int | None = None,
    cache_dtype: str | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    split: bool = True,
) -> sj.LM:
    """A model of shapes only; ``layers``: so many alone.

    With ``split``, the devices of the mesh share it. ``mesh`` None: one device.
    """
    dtype = jnp.dtype(dtype)
    count = mesh.shape["model"] if mesh is not None and split else 1
    if layers:
        cfg = cfg.first_layers(min(cfg.num_layers, layers))

    def layout(params):
        params = fuse(params)
        if quantize:
            params = quantize_params(cfg, params, quantize, dtype)
        return split_layers(cfg, params, count)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), param_shapes(cfg))
    fused = jax.eval_shape(layout, shapes)
    params = _placed(fused, None if mesh is None else param_specs(cfg, fused, count), mesh)
    width = lm.resolve_pass_width(pass_width)
    config = split_config(cfg, count)
    return sj.LM(config, params, None, (2,), cfg.vocab_size, "shapes", mesh, width, cache_dtype)


def lower_rounds(
    engine: Engine,
    rows: int,
    capacity: int,
    mesh: Mesh | None,
    sampling: sj.Sampling = SAMPLED,
    with_tables: bool = False,
) -> jax.stages.Lowered:
    """The lowered loop of rounds; ``with_tables``: under grammars that are tables."""
    inputs = engine.inputs(sampling, rows, range(rows))
    prefill = loop.prefill_prompts(engine.method, CHUNK, False)
    filled = jax.eval_shape(prefill, inputs, *_prefill_arguments(rows, capacity))
    method = engine.method
    if with_tables:
        inputs = inputs.replace(grammars=grammar_shapes(engine.target.net.vocab, rows))
        filled = filled.replace(grammar_state=filled.length)
        assert isinstance(method, DraftVerify), "other methods have no grammars"
        method = longest_drafts(method)
    state = _placed(filled, None if mesh is None else specs_of(filled), mesh)
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    return loop.run_rounds(method).lower(inputs, state, rounds)


def grammar_shapes(vocab: int, rows: int) -> GrammarTables:
    """Tables of usual sizes for rows with grammars."""
    shaped = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    return GrammarTables(
        next_state=shaped((STATES, CLASSES)),
        token_class=shaped((GRAMMARS, vocab)),
        allowed=shaped((STATES, -(-vocab // 32))),
        forced=shaped((STATES,)),
        grammar=shaped((rows,)),
        first=shaped((rows,)),
    )


def lower_prefill(
    engine: Engine, rows: int, capacity: int, chunk: int, sampling: sj.Sampling = SAMPLED
) -> jax.stages.Lowered:
    """The lowered prefill of whole prompts, ``chunk`` tokens of each row a pass."""
    inputs = engine.inputs(sampling, rows, range(rows))
    return loop.prefill_prompts(engine.method, chunk, False).lower(
        inputs, *_prefill_arguments(rows, capacity)
    )


def _prefill_arguments(rows: int, capacity: int) -> tuple[Any, ...]:
    """Tokens, lengths, longest lengths and keys of the rows."""
    shaped = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    return shaped((rows, capacity)), shaped((rows,)), shaped((rows,)), keys


def _placed(shapes: Any, specs: Any, mesh: Mesh | None) -> Any:
    """The shapes, on the devices of a mesh."""
    if mesh is None:
        return shapes

    def placed(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(placed, shapes, specs)
