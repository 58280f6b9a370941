"""Which parameters of a checkpoint are trained: all, the embeddings, or low-rank updates (LoRA).

A tuning splits params into a trainable and a frozen tree, and merges them again, both inside the
loss and at export. The exported model is an ordinary one, except for gated updates: those are
exported as adapters beside the params, which do not change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.adapters import DOWN, KEY, UP, adapt, distinct
from train.config import Tuned
from train.engine.loop import LossFn

TABLES = ("embed", "head")
GATED = "gated-lora"
LOW_RANK = ("lora", GATED)  # the values of model.train that use LoRA


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A split of params into (trainable, frozen): ``merge(*split(params))`` are the params.

    Attributes:
      split: called once, at the start.
      merge: called in every forward pass, and at export.
      gated: no param changes; the trainable tree holds adapters beside them.
    """

    split: Callable[[dict], tuple[dict, dict]]
    merge: Callable[[dict, dict], dict]
    gated: bool = False

    def over_trained(self, loss: LossFn) -> LossFn:
        """A loss of the params, as the training loop takes it: of the two trees."""
        return lambda trainable, frozen, batch: loss(self.merge(trainable, frozen), None, batch)


def make_tuning(
    section: Tuned,
    adaptive_ids: tuple[int, ...],
    seed: int,
    earlier: Callable[[], dict] | None = None,
) -> Tuning:
    """The tuning that the config asks for, of a model with these adaptive ids.

    Args:
      earlier: returns the adapters that gated updates go on from, instead of new ones.
    """
    if section.train == "full":
        return Tuning(lambda params: (params, {}), lambda trainable, frozen: trainable)
    if section.train == "embeddings":
        return embeddings()
    # Each distinct id has one row, however many places of the window use it.
    ids = distinct(adaptive_ids)
    if section.train == GATED:
        return gated_lora(ids, section, seed, earlier)
    return lora(ids, section, seed)


def embeddings() -> Tuning:
    """Trains the embedding, and the output layer if it is not tied."""

    def split(params):
        tables = {name: params[name] for name in TABLES if name in params}
        return tables, {name: x for name, x in params.items() if name not in tables}

    return Tuning(split, lambda trainable, frozen: frozen | trainable)


def lora(ids: tuple[int, ...], section: Tuned, seed: int) -> Tuning:
    """Trains low-rank updates of the blocks' matrices (arXiv 2106.09685), and the adaptive rows.

    ``W + alpha/rank · up @ down`` with ``down`` random and ``up`` zero at first. The rows
    ``ids`` of the embedding are trained in full: they start at the mean of all rows.
    """
    rows = np.asarray(ids)
    scale = section.lora_alpha / section.lora_rank

    def split(params):
        factors = _first_factors(params["layers"], section, seed)
        return {"adaptive": params["embed"][rows], "layers": factors}, params

    def merge(trainable, frozen):
        layers = adapt(
            frozen["layers"], trainable["layers"], lambda x, down, up: x + scale * up @ down
        )
        # Only these rows of the table get a gradient.
        embed = frozen["embed"].at[rows].set(trainable["adaptive"])
        return frozen | {"embed": embed, "layers": layers}

    return Tuning(split, merge)


def gated_lora(
    ids: tuple[int, ...],
    section: Tuned,
    seed: int,
    earlier: Callable[[], dict] | None = None,
) -> Tuning:
    """Trains the same updates, applied at adaptive tokens only (:mod:`specjax.models.adapters`).

    No param changes, so the model's output without adaptive tokens stays the same. ``earlier``
    returns adapters to go on from, as they are exported.
    """
    section = dataclasses.replace(section, train=GATED)
    scale = section.lora_alpha / section.lora_rank

    def split(params):
        if earlier is not None:
            adapters = earlier()
            return adapters | {"layers": _times(adapters["layers"], 1 / scale)}, params
        # The mean of all rows, like the adaptive rows of lora.
        embed = jnp.tile(params["embed"].mean(0), (len(ids), 1))
        factors = _first_factors(params["layers"], section, seed)
        return {"embed": embed, "layers": factors}, params

    def merge(trainable, frozen):
        layers = _times(trainable["layers"], scale)
        return frozen | {KEY: trainable | {"layers": layers}}

    return Tuning(split, merge, gated=True)


def _times(layers: dict, factor: float) -> dict:
    """The layers' updates, each ``factor`` times as large."""

    def scaled(path, x):
        return factor * x if path[-1].key == UP else x

    return jax.tree_util.tree_map_with_path(scaled, layers)


def adapted(layers: dict, section: Tuned) -> dict[tuple[str, str, str], jax.Array]:
    """The matrices that the config updates, by (layer, module, name).

    Experts, shared ones, and their routers stay as they are.
    """
    fixed = {"router"}
    if section.train == GATED:
        fixed.add("kv_up")  # decoding absorbs it into queries and results of all tokens
    chosen = {}
    for layer, block in layers.items():
        for part, modules in block.items():
            for name, module in modules.items():
                if name in fixed or not isinstance(module, dict) or "weight" not in module:
                    continue
                if module["weight"].ndim != 2:
                    continue  # a norm
                if not section.lora_matrices or name in section.lora_matrices:
                    chosen[layer, part, name] = module["weight"]
    return chosen


def _first_factors(layers: dict, section: Tuned, seed: int) -> dict:
    """The first factors of each update, as :func:`specjax.models.adapters.adapt` takes them."""
    rank = section.lora_rank
    matrices = adapted(layers, section)
    keys = jax.random.split(jax.random.key(seed), len(matrices))
    factors = {layer: {} for layer in layers}
    for key, ((layer, part, name), x) in zip(keys, matrices.items(), strict=True):
        outputs, inputs = x.shape
        down = jax.random.normal(key, (rank, inputs), x.dtype) * inputs**-0.5
        up = jnp.zeros((outputs, rank), x.dtype)
        factors[layer].setdefault(part, {})[name] = {DOWN: down, UP: up}
    return factors
