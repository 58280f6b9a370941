"""What of a checkpoint is trained: everything, the tables, or low-rank updates.

A tuning splits params into a trainable and a frozen tree and puts them together again, inside
the loss as well as at export. The exported model is an ordinary one, but for gated updates: those
stay apart from the params, which nothing changes.
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
LOW_RANK = ("lora", GATED)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """``merge(*split(params))`` are the params; ``split`` is called once, at the start.

    ``gated``: no param changes, and adapters stand beside them.
    """

    split: Callable[[dict], tuple[dict, dict]]
    merge: Callable[[dict, dict], dict]
    gated: bool = False

    def over_trained(self, loss: LossFn) -> LossFn:
        """A loss of the params as a function of what is trained, for the loop."""
        return lambda trainable, frozen, batch: loss(self.merge(trainable, frozen), None, batch)


def make_tuning(section: Tuned, adaptive_ids: tuple[int, ...], seed: int) -> Tuning:
    """What the config trains of a model with these ids."""
    if section.train == "full":
        return Tuning(lambda params: (params, {}), lambda trainable, frozen: trainable)
    if section.train == "embeddings":
        return embeddings()
    make = gated_lora if section.train == GATED else lora
    return make(distinct(adaptive_ids), section, seed)


def embeddings() -> Tuning:
    """The embedding, and the head where it is not tied."""

    def split(params):
        tables = {name: params[name] for name in TABLES if name in params}
        return tables, {name: x for name, x in params.items() if name not in tables}

    return Tuning(split, lambda trainable, frozen: frozen | trainable)


def lora(ids: tuple[int, ...], section: Tuned, seed: int) -> Tuning:
    """Low-rank updates of the blocks' matrices (arXiv 2106.09685), and the adaptive rows.

    ``W + alpha/rank · up @ down`` with ``down`` random and ``up`` zero at first. The rows
    ``ids`` of the embedding are trained in full: they start at the mean and say nothing yet.
    """
    rows, scale = np.asarray(ids), section.lora_alpha / section.lora_rank

    def split(params):
        pairs = _pairs(params["layers"], section, seed)
        return {"adaptive": params["embed"][rows], "layers": pairs}, params

    def merge(trainable, frozen):
        layers = adapt(
            frozen["layers"], trainable["layers"], lambda x, down, up: x + scale * up @ down
        )
        embed = frozen["embed"].at[rows].set(trainable["adaptive"])
        return frozen | {"embed": embed, "layers": layers}

    return Tuning(split, merge)


def gated_lora(ids: tuple[int, ...], section: Tuned, seed: int) -> Tuning:
    """The same updates at adaptive tokens alone (:mod:`specjax.models.adapters`).

    No param changes, and so nothing that the model says without adaptive tokens.
    """
    scale = section.lora_alpha / section.lora_rank

    def split(params):
        embed = jnp.tile(params["embed"].mean(0), (len(ids), 1))
        return {"embed": embed, "layers": _pairs(params["layers"], section, seed)}, params

    def merge(trainable, frozen):
        def scaled(path, x):
            return scale * x if path[-1].key == UP else x

        layers = jax.tree_util.tree_map_with_path(scaled, trainable["layers"])
        return frozen | {KEY: trainable | {"layers": layers}}

    return Tuning(split, merge, gated=True)


def adapted(layers: dict, section: Tuned) -> dict[tuple[str, str, str], jax.Array]:
    """The matrices that the config updates, by layer, module and name."""
    return {
        (i, part, name): module["weight"]
        for i, block in layers.items()
        for part, modules in block.items()
        for name, module in modules.items()
        if isinstance(module, dict) and module["weight"].ndim == 2
        if not section.lora_matrices or name in section.lora_matrices
    }


def _pairs(layers: dict, section: Tuned, seed: int) -> dict:
    """The factors of each update, in the tree that :func:`specjax.models.adapters.adapt` takes."""
    chosen, rank, pairs = adapted(layers, section), section.lora_rank, {i: {} for i in layers}
    keys = jax.random.split(jax.random.key(seed), len(chosen))
    for key, ((i, part, name), x) in zip(keys, chosen.items(), strict=True):
        outputs, inputs = x.shape
        down = jax.random.normal(key, (rank, inputs), x.dtype) * inputs**-0.5
        pair = {DOWN: down, UP: jnp.zeros((outputs, rank), x.dtype)}
        pairs[i].setdefault(part, {})[name] = pair
    return pairs
