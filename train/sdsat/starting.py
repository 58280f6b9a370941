"""The checkpoint that ``train.sdsat`` starts from: a model, or a delta whose training goes on."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from specjax._util.errors import InputError
from specjax.lm import base_of, locate
from specjax.models import ModelConfig, param_shapes
from specjax.models.hf.delta import Delta, load_delta, read_delta
from specjax.models.hf.read import complete_config
from train.config import Tuned
from train.engine.starting import require_model
from train.sdsat.trainable import GATED, adapted


class Start(NamedTuple):
    """What ``model.init_from`` names."""

    directory: Path  # of the model; for a delta, of its base
    base_name: str  # by which an exported delta names that model
    config: ModelConfig  # of the model; for a delta, with its adaptive ids
    delta: Delta | None
    delta_directory: Path

    def adapters(self) -> dict:
        """The delta's adapters, in float32.

        Raises:
          ModelError: as :func:`specjax.models.hf.delta.load_delta`.
        """
        assert self.delta is not None
        return load_delta(
            self.delta_directory, self.delta, self.directory, self.config, jnp.dtype("float32")
        )


def find_start(section: Tuned) -> Start:
    """Reads the small files of ``model.init_from``.

    Raises:
      InputError: the config does not fit the checkpoint.
      ModelError: the checkpoint is not there or cannot be read.
    """
    name = section.init_from
    if not name:
        raise InputError("model.init_from is empty: name a Hugging Face directory to tune")
    named = locate(name)
    delta = read_delta(named)
    if delta is None:
        if section.base:
            raise InputError(f"model.base={section.base!r}: {name} is no delta; leave it out")
        config = complete_config(named)
        require_model(config, name)
        return Start(named, name, config, None, named)

    directory = base_of(name, base=section.base or None)
    by_name = not section.base and not delta.base.startswith(".")
    base_name = delta.base if by_name else os.fspath(directory)
    config = dataclasses.replace(complete_config(directory), adaptive_ids=delta.adaptive_ids)
    _check_delta(section, delta, config)
    return Start(directory, base_name, config, delta, named)


def _check_delta(section: Tuned, delta: Delta, config: ModelConfig) -> None:
    """Raises InputError if the config asks for other adapters than the delta has."""
    name = section.init_from
    if section.train != GATED:
        raise InputError(
            f"model.train={section.train!r}, but model.init_from={name!r} is a delta: set "
            f"model.train to {GATED!r}, or start from its base"
        )
    if section.lora_rank != delta.rank:
        raise InputError(
            f"model.lora_rank={section.lora_rank}, but model.init_from={name!r} has rank "
            f"{delta.rank}: set it to that"
        )
    asked = adapted({"0": param_shapes(config)["layers"]["0"]}, section)
    if {f"{module}.{matrix}" for _, module, matrix in asked} != set(delta.matrices):
        names = [matrix.rpartition(".")[2] for matrix in delta.matrices]
        raise InputError(
            f"model.lora_matrices={list(section.lora_matrices)}, but model.init_from={name!r} "
            f"adapts others: set it to {names}"
        )
