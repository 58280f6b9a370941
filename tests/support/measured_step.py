"""Peak memory of two real training steps: python tests/support/measured_step.py < CONFIG.json

Prints {"predicted", "measured", "by_hand"} in bytes. It runs as a process of its own, so that the
step cannot reuse memory that something else has freed.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax._util.memory import return_memory
from train.config import SDSATConfig, from_dict
from train.engine.loop import make_step
from train.engine.placement import Placement
from train.engine.shares import Shares
from train.sdsat.dryrun import step_parts
from train.sdsat.memory import compile_step, estimate
from train.sdsat.prepare import prepare_setup


def memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def zeros(shapes):
    # Write the pages: memory counts as used only once it is touched.
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def main() -> None:
    cfg = from_dict(SDSATConfig, json.load(sys.stdin))
    setup = prepare_setup(cfg)
    parts = step_parts(cfg, setup, setup.model)
    compiled = compile_step(parts, Placement(), setup.model.num_layers)
    by_hand = estimate(setup.model, parts, Shares(), 1, cfg.model.compute_dtype, cfg.model.remat)
    step = make_step(parts.loss, parts.optimizer, parts.weigh)
    state = jax.eval_shape(parts.optimizer.init, parts.trainable)
    step = step.lower(parts.trainable, state, parts.frozen, parts.batches).compile()
    jax.clear_caches()
    return_memory()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    params, frozen, batches = zeros(parts.trainable), zeros(parts.frozen), zeros(parts.batches)
    opt_state = zeros(state)
    for _ in range(2):
        params, opt_state, *_ = jax.block_until_ready(step(params, opt_state, frozen, batches))
    measured = memory("VmHWM") - before
    print(
        json.dumps(
            {"predicted": compiled.total, "measured": measured, "by_hand": sum(by_hand.values())}
        )
    )


if __name__ == "__main__":
    main()
