"""``train.sdsat --dry-run``: whether a recipe fits its devices, without weights or devices.

The step is compiled for the devices that are here, or where the recipe names others, in a
process of its own: for a TPU topology where libtpu is installed (it compiles without any TPU),
else for as many simulated CPU devices, whose memory is an upper estimate.

python -m train.dryrun < CONFIG.json    is that process; it prints one object.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import InputError
from specjax.models import ModelConfig, param_shapes
from train.config import SDSATConfig, from_dict
from train.engine.optim import make_optimizer
from train.engine.placement import make_placement
from train.sdsat import program as sdsat
from train.sdsat.losses import sdsat_loss, weigh
from train.sdsat.memory import (
    DEVICE_GIB,
    GIB,
    Compiled,
    Parts,
    compile_deep,
    compile_step,
    estimate,
)

SIMULATED = "simulated CPU devices: an upper estimate"
_TOO_LARGE = "RESOURCE_EXHAUSTED"  # how the TPU compiler says that a step does not fit


def dry_run(cfg: SDSATConfig, setup: sdsat.Setup) -> dict[str, Any]:
    """Bytes per device, by hand and by the compiler, and whether they fit.

    Raises:
      InputError: the rows or the copies do not divide among the devices.
    """
    devices = device_count(cfg)
    elsewhere = cfg.mesh.topology or devices != jax.device_count()
    found = _in_a_process(cfg, devices) if elsewhere else compile_here(cfg, setup)
    parts = step_parts(cfg, setup, setup.model)
    by_hand = estimate(
        setup.model, parts, cfg.mesh.fsdp, devices, cfg.model.compute_dtype, cfg.model.remat
    )
    total = sum(by_hand.values())
    needed = found.get("gib_compiled") or round(total / GIB, 3)
    memory = cfg.mesh.memory_gib or found.pop("gib_of_device", None)
    fits = {} if not memory else {"gib_of_device": memory, "fits": _fits(found, needed, memory)}
    table = {name: round(size / GIB, 3) for name, size in by_hand.items()}
    return {
        "devices": devices,
        "gib_by_hand": table | {"total": round(total / GIB, 3)},
        **found,
        **fits,
    }


def _fits(found: dict[str, Any], needed: float, memory: float) -> bool:
    return needed <= memory and "refused" not in found


def device_count(cfg: SDSATConfig) -> int:
    """Of the topology, or as the config says, or those that are here.

    Raises:
      InputError: the topology is of another form.
    """
    if not cfg.mesh.topology:
        return cfg.mesh.devices or jax.device_count()
    _, _, sizes = cfg.mesh.topology.partition(":")
    try:
        return math.prod(int(size) for size in sizes.split("x"))
    except ValueError:
        raise InputError(
            f"mesh.topology={cfg.mesh.topology!r}: expected KIND:AxB or KIND:AxBxC, e.g. v5e:2x4"
        ) from None


def step_parts(cfg: SDSATConfig, setup: sdsat.Setup, model: ModelConfig) -> Parts:
    """The config's step as shapes, for ``model``: the setup's, or a shallow copy of it."""
    tuned = sdsat.make_tuning(cfg, setup)
    trainable, frozen = jax.eval_shape(tuned.split, param_shapes(model))
    blank = np.zeros(cfg.data.seq_len, np.int32)
    row = dict.fromkeys(("tokens", "labels", "segments", "positions"), blank)
    row = sdsat.transforms(cfg, setup.insertion)[0](row, 0)
    lead = (cfg.optim.accumulate, cfg.optim.batch_size)
    batches = {name: jax.ShapeDtypeStruct((*lead, *x.shape), jnp.int32) for name, x in row.items()}
    objective = setup.objective
    return Parts(
        sdsat.merged(sdsat_loss(model, objective), tuned),
        make_optimizer(cfg.optim),
        functools.partial(weigh, objective),
        trainable,
        frozen,
        batches,
        2 if cfg.sdsat.loss == "improved" else 1,
    )


def compile_here(cfg: SDSATConfig, setup: sdsat.Setup, devices: list | None = None) -> dict:
    """The compiler's account for ``devices``, by default those of this process."""
    rows = cfg.optim.batch_size
    placement = make_placement(cfg.mesh.fsdp, rows, devices)
    first = (devices or jax.devices())[0]
    said = (first.memory_stats() or {}).get("bytes_limit") if devices is None else None
    memory = said / GIB if said else DEVICE_GIB.get(first.device_kind)
    about = {"compiled_for": first.device_kind}
    about |= {"gib_of_device": memory} if memory else {}

    def compile_at(model: ModelConfig) -> Compiled:
        return compile_step(step_parts(cfg, setup, model), placement, model.num_layers)

    try:
        found = compile_deep(setup.model, compile_at)
    except jax.errors.JaxRuntimeError as error:
        if _TOO_LARGE not in str(error):
            raise
        return about | {"refused": " ".join(str(error).split())[:300]}
    if len(found.layers) > 1:
        about["extrapolated_from_layers"] = list(found.layers)
    sizes = {"arguments": found.arguments, "temporaries": found.temporaries, "results": found.fresh}
    return about | {
        "gib_compiled": round(found.total / GIB, 3),
        "gib_compiled_parts": {name: round(size / GIB, 3) for name, size in sizes.items()},
    }


def _in_a_process(cfg: SDSATConfig, devices: int) -> dict:
    """:func:`compile_here` for devices that this process does not have."""
    here = bool(cfg.mesh.topology) and importlib.util.find_spec("libtpu") is not None
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    if here:
        # No TPU is asked for: without these libtpu looks for one on the network.
        settings = {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
        }
    else:
        mesh = dataclasses.replace(cfg.mesh, topology="", devices=devices)
        cfg = dataclasses.replace(cfg, mesh=mesh)
    done = subprocess.run(
        [sys.executable, "-m", "train.sdsat.dryrun"],
        input=json.dumps(cfg, default=vars),
        capture_output=True,
        text=True,
        env=os.environ | settings,
    )
    if done.returncode == 2:
        raise InputError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise InputError(
            f"--dry-run: the step could not be compiled for {devices} devices ({last})"
        )
    found = json.loads(done.stdout.splitlines()[-1])
    return found if here else found | {"compiled_for": SIMULATED}


def main() -> int:
    """Reads a config from standard input and prints :func:`compile_here`'s answer."""
    try:
        cfg = from_dict(SDSATConfig, json.load(sys.stdin))
        print(json.dumps(compile_here(cfg, sdsat.prepare_setup(cfg), _topology(cfg))))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _topology(cfg: SDSATConfig) -> list | None:
    """The devices of the config's topology; None where it names none."""
    if not cfg.mesh.topology:
        return None
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=cfg.mesh.topology)
    except Exception as error:  # whatever libtpu raises
        first = str(error).strip().splitlines()[0]
        raise InputError(
            f"mesh.topology={cfg.mesh.topology!r}: libtpu does not know it ({first}); "
            "write e.g. v5e:2x4"
        ) from None
    return list(found.devices)


if __name__ == "__main__":
    sys.exit(main())
