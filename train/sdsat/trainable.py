"""What of a checkpoint is trained: everything, the tables, or low-rank updates.

A tuning splits params into a trainable and a frozen tree and puts them together again, inside
the loss as well as at export, so that the exported model is an ordinary one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from train.config import Tuned
from train.engine.loop import LossFn

TABLES = ("embed", "head")


@dataclasses.dataclass(frozen=True)
class Tuning:
    """``merge(*split(params))`` are the params; ``split`` is called once, at the start."""

    split: Callable[[dict], tuple[dict, dict]]
    merge: Callable[[dict, dict], dict]

    def over_trained(self, loss: LossFn) -> LossFn:
        """A loss of the params as a function of what is trained, for the loop."""
        return lambda trainable, frozen, batch: loss(self.merge(trainable, frozen), None, batch)


def make_tuning(section: Tuned, adaptive_ids: tuple[int, ...], seed: int) -> Tuning:
    """What the config trains of a model with these ids."""
    if section.train == "full":
        return Tuning(lambda params: (params, {}), lambda trainable, frozen: trainable)
    if section.train == "embeddings":
        return embeddings()
    return lora(tuple(sorted(set(adaptive_ids))), section.lora_rank, section.lora_alpha, seed)


def embeddings() -> Tuning:
    """The embedding, and the head where it is not tied."""

    def split(params):
        tables = {name: params[name] for name in TABLES if name in params}
        return tables, {name: x for name, x in params.items() if name not in tables}

    return Tuning(split, lambda trainable, frozen: frozen | trainable)


def lora(ids: tuple[int, ...], rank: int, alpha: float, seed: int) -> Tuning:
    """Low-rank updates of the blocks' matrices (arXiv 2106.09685), and the adaptive rows.

    ``W + alpha/rank · up @ down`` with ``down`` random and ``up`` zero at first. The rows
    ``ids`` of the embedding are trained in full: they start at the mean and say nothing yet.
    """
    rows = np.asarray(ids)

    def split(params):
        leaves, tree = jax.tree.flatten(params["layers"])
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        low = [_low_rank(key, x, rank) for key, x in zip(keys, leaves, strict=True)]
        trainable = {"adaptive": params["embed"][rows], "layers": jax.tree.unflatten(tree, low)}
        return trainable, params

    def merge(trainable, frozen):
        leaves, tree = jax.tree.flatten(frozen["layers"])
        low = tree.flatten_up_to(trainable["layers"])
        scale = alpha / rank
        layers = [
            x + scale * pair["up"] @ pair["down"] if pair else x
            for x, pair in zip(leaves, low, strict=True)
        ]
        embed = frozen["embed"].at[rows].set(trainable["adaptive"])
        return frozen | {"embed": embed, "layers": jax.tree.unflatten(tree, layers)}

    return Tuning(split, merge)


def _low_rank(key: jax.Array, x: jax.Array, rank: int) -> dict:
    """The pair of a matrix ``[out, in]``; empty for norms and biases."""
    if x.ndim != 2:
        return {}
    outputs, inputs = x.shape
    down = jax.random.normal(key, (rank, inputs), x.dtype) * inputs**-0.5
    return {"up": jnp.zeros((outputs, rank), x.dtype), "down": down}
