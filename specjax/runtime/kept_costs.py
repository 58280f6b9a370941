"""Costs of rounds on disk, so that a machine measures a method on a model's shapes only once.

They lie beside the compiled programs (:func:`~specjax._util.files.program_cache`), one small file
each. Its name has a digest of all that a cost depends on.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import platform as machine
from typing import Any

import jax

from specjax._util.files import json_line, parse_json, program_cache, read_file, write_text
from specjax._util.platform import platform, usable_cores
from specjax.models.cpu_kernels.building import kernels

NAME = "costs"  # of the directory
WAY = 3  # of measuring: costs that were measured in another way are not read


def costs_name(*about: Any) -> str:
    """The name under which costs are kept: of this machine, and of what they depend on."""
    device = jax.devices()[0].device_kind
    # The names of a CPU's kernels have a digest of their source.
    products = sorted(kernels().names.values()) if platform().kernel_rows else []
    versions = (WAY, jax.__version__, products)
    here = (versions, device, jax.device_count(), machine.machine(), usable_cores(), platform())
    return hashlib.sha256(repr((here, about)).encode()).hexdigest()[:32]


def read_costs(name: str, count: int) -> tuple[float, ...] | None:
    """The costs that were kept under a name; None if there are none, or not ``count`` times."""
    directory = program_cache(NAME)
    if directory is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        costs = parse_json(read_file(directory / f"{name}.json"))
        if isinstance(costs, list) and len(costs) == count and all(map(_is_time, costs)):
            return tuple(costs)
    return None


def keep_costs(name: str, costs: tuple[float, ...]) -> None:
    """Keeps costs. Where nothing can be written, the next run measures again."""
    directory = program_cache(NAME)
    if directory is None:
        return
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(directory / f"{name}.json", json_line(list(costs)))


def _is_time(cost: Any) -> bool:
    return isinstance(cost, float) and 0 < cost < math.inf
