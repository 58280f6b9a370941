"""``train.sdsat --dry-run``: whether a recipe fits its devices, without weights or devices.

The step is compiled for the devices that are here. If the recipe names other devices, it is
compiled in another process. That process compiles for a TPU topology if libtpu is installed (which
needs no TPU), otherwise for simulated CPU devices, whose memory is an upper estimate.

python -m train.sdsat.dryrun < CONFIG.json    is that process; it prints one JSON object.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding

from specjax._util.errors import InputError, SpecjaxError
from specjax._util.program import BAD_INPUT, Parser, module_command
from specjax.models import ModelConfig, param_shapes
from train.config import SDSATConfig, from_dict, to_dict
from train.engine.optim import make_optimizer
from train.engine.placement import device_count, make_placement
from train.engine.shares import Shares, can_share
from train.sdsat import memory
from train.sdsat.losses import sdsat_loss, weigh
from train.sdsat.memory import GIB, Compiled, Parts
from train.sdsat.prepare import SdsatSetup, prepare_setup, transforms

SIMULATED = "simulated CPU devices: an upper estimate"
_TOO_LARGE = "RESOURCE_EXHAUSTED"  # the TPU compiler's word for a step that does not fit


def needed_memory(cfg: SDSATConfig, setup: SdsatSetup) -> dict[str, Any]:
    """GiB per device, as estimated and as the compiler says, and whether the step fits.

    Raises:
      InputError: the rows, or the copies of the params, do not divide among the devices.
    """
    devices = device_count(cfg.mesh)
    if cfg.mesh.topology or devices != jax.device_count():
        compiled = _compile_in_a_process(cfg, devices)
    else:
        compiled = compile_here(cfg, setup)

    parts = step_parts(cfg, setup, setup.model)
    dtype = cfg.model.compute_dtype
    shares = Shares(cfg.mesh.fsdp, cfg.mesh.model).of_models(setup.model)
    estimate = memory.estimate(setup.model, parts, shares, devices, dtype, cfg.model.remat)
    estimate["total"] = sum(estimate.values())
    table = {name: round(size / GIB, 3) for name, size in estimate.items()}

    needed = compiled.get("gib_compiled") or table["total"]
    if cfg.sdsat.decode_prompts:
        evaluation = memory.evaluation(setup.model, parts, shares, dtype) / GIB
        needed = max(needed, evaluation)
        compiled["gib_evaluation"] = round(evaluation, 3)
    capacity = cfg.mesh.memory_gib or compiled.pop("gib_of_device", None)
    needs = {"devices": devices, "gib_by_hand": table, **compiled}
    if capacity:
        fits = needed <= capacity and "refused" not in compiled
        needs |= {"gib_of_device": capacity, "fits": fits}
        if not fits:
            needs["takes_less"] = lighter(cfg, setup.model, devices)
    return needs


def lighter(cfg: SDSATConfig, model: ModelConfig, devices: int) -> list[str]:
    """Settings that take less memory, each by itself; those that slow a step least come first."""
    optim = cfg.optim
    full = cfg.model.train == "full"
    factored = optim.optimizer == "adafactor"
    # Rows, one for each group of devices.
    fewest = devices // (cfg.mesh.sequence * cfg.mesh.model)
    smaller = f"optim.batch_size={fewest} with a larger optim.accumulate"
    # Twice as many devices share a row.
    parts = 2 * cfg.mesh.sequence
    shares = 2 * cfg.mesh.model
    divides = devices % (2 * cfg.mesh.sequence * cfg.mesh.model * cfg.mesh.fsdp) == 0
    splits = divides and cfg.data.seq_len % parts == 0
    # Setting: whether the config could still change to it.
    possible = {
        "model.scan=true": not cfg.model.scan and model.num_layers > memory.DEEPEST,
        'model.compute_dtype="bfloat16"': cfg.model.compute_dtype != "bfloat16",
        f"mesh.fsdp={devices}": cfg.mesh.fsdp < devices,
        smaller: optim.batch_size > fewest,
        'optim.moments="bfloat16"': not factored and optim.moments != "bfloat16",
        'sdsat.loss="isolated"': cfg.sdsat.loss == "improved",
        'model.remat="attention"': not cfg.model.remat,
        "model.remat=true": cfg.model.remat is not True,
        f"mesh.sequence={parts} with optim.batch_size={fewest // 2}": splits,
        f"mesh.model={shares} with optim.batch_size={fewest // 2}": divides
        and can_share(model, shares),
        'optim.optimizer="adafactor"': full and not factored,
        'model.train="gated-lora"': full,
    }
    return [*(setting for setting, unused in possible.items() if unused), "more devices"]


def step_parts(
    cfg: SDSATConfig, setup: SdsatSetup, model: ModelConfig, rows: NamedSharding | None = None
) -> Parts:
    """The config's step as shapes, for ``model``: the setup's, or a shallow copy of it.

    Args:
      rows: the sharding of a batch's rows; None: on one device.
    """
    trainable, frozen = jax.eval_shape(setup.tuning.split, param_shapes(model))
    # A row of zeros, laid out as the loss needs it: only its shapes count.
    blank = np.zeros(cfg.data.seq_len, np.int32)
    row = dict.fromkeys(("tokens", "labels", "segments", "positions"), blank)
    row = transforms(cfg, setup.insertion).training(row, 0)
    lead = (cfg.optim.accumulate, cfg.optim.batch_size)
    return Parts(
        loss=setup.tuning.over_trained(sdsat_loss(model, setup.objective, rows)),
        optimizer=make_optimizer(cfg.optim),
        weigh=functools.partial(weigh, setup.objective),
        trainable=trainable,
        frozen=frozen,
        batches={k: jax.ShapeDtypeStruct((*lead, *x.shape), jnp.int32) for k, x in row.items()},
        sequences=2 if cfg.sdsat.loss == "improved" else 1,
    )


def compile_here(
    cfg: SDSATConfig, setup: SdsatSetup, devices: list | None = None
) -> dict[str, Any]:
    """What the compiler says for ``devices``, by default those of this process."""
    mesh = cfg.mesh
    placement = make_placement(
        mesh.fsdp, cfg.optim.batch_size, devices, mesh.sequence, mesh.model
    ).of_models(setup.model)
    about = _describe_device(devices)

    def compile_at(model: ModelConfig) -> Compiled:
        parts = step_parts(cfg, setup, model, placement.row_sharding(0))
        return memory.compile_step(parts, placement, model.num_layers)

    try:
        compiled = memory.compile_deep(setup.model, compile_at, cfg.model.scan)
    except jax.errors.JaxRuntimeError as error:
        if _TOO_LARGE not in str(error):
            raise
        return about | {"refused": " ".join(str(error).split())[:300]}
    if len(compiled.layers) > 1:
        about["extrapolated_from_layers"] = list(compiled.layers)
    sizes = zip(("arguments", "temporaries", "results"), compiled.sizes, strict=True)
    return about | {
        "gib_compiled": round(compiled.total / GIB, 3),
        "gib_compiled_parts": {name: round(size / GIB, 3) for name, size in sizes},
    }


def _describe_device(devices: list | None) -> dict[str, Any]:
    """The kind of the devices, and the memory of one of them if it is known."""
    first = (devices or jax.devices())[0]
    limit = None
    if devices is None:  # devices of a topology have no memory to ask
        limit = (first.memory_stats() or {}).get("bytes_limit")
    capacity = limit / GIB if limit else memory.DEVICE_GIB.get(first.device_kind)

    about = {"compiled_for": first.device_kind}
    if capacity:
        about["gib_of_device"] = capacity
    return about


def _compile_in_a_process(cfg: SDSATConfig, devices: int) -> dict[str, Any]:
    """:func:`compile_here` for devices that this process does not have."""
    settings = {"JAX_PLATFORMS": "cpu"}
    for_tpus = bool(cfg.mesh.topology) and importlib.util.find_spec("libtpu") is not None
    if for_tpus:
        # Without these, libtpu looks for a TPU on the network.
        settings |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
        }
    else:
        flags = os.environ.get("XLA_FLAGS", "")
        settings["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}"
        mesh = dataclasses.replace(cfg.mesh, topology="", devices=devices)
        cfg = dataclasses.replace(cfg, mesh=mesh)
    done = subprocess.run(
        module_command("train.sdsat.dryrun"),
        input=json.dumps(to_dict(cfg)),
        capture_output=True,
        text=True,
        env=os.environ | settings,
    )
    last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    if done.returncode == BAD_INPUT:
        raise InputError(last)
    if done.returncode:
        raise InputError(
            f"--dry-run: the step could not be compiled for {devices} devices ({last})"
        )
    compiled = json.loads(done.stdout.splitlines()[-1])
    if not for_tpus:
        compiled["compiled_for"] = SIMULATED
    return compiled


def main() -> int:
    """Reads a config from standard input and prints the result of :func:`compile_here`."""
    Parser("train.sdsat.dryrun", __doc__).parse_args()
    try:
        cfg = from_dict(SDSATConfig, json.load(sys.stdin))
        if cfg.mesh.topology:
            # Models choose kernels by the default backend: here the one that is compiled for.
            jax.default_backend = lambda: "tpu"
        print(json.dumps(compile_here(cfg, prepare_setup(cfg), _topology(cfg))))
    except SpecjaxError as error:
        print(error, file=sys.stderr)  # the parent process adds the program's name
        return BAD_INPUT
    return 0


def _topology(cfg: SDSATConfig) -> list | None:
    """The devices of the config's topology; None if it names none."""
    if not cfg.mesh.topology:
        return None
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=cfg.mesh.topology)
    except Exception as error:  # libtpu raises errors of several types
        first = str(error).strip().splitlines()[0]
        raise InputError(
            f"mesh.topology={cfg.mesh.topology!r}: libtpu does not know it ({first}); "
            "write e.g. v5e:2x4"
        ) from None
    return list(topology.devices)


if __name__ == "__main__":
    sys.exit(main())
