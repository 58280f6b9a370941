"""The models that the arguments name, and the cache of compiled programs."""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path

import jax

from specjax import lm
from specjax.core.mesh import make_mesh
from specjax.lm import LM

DEMO_DRAFT = "demo-draft"


def draft_name(args: argparse.Namespace, want_draft: bool) -> str | None:
    """What ``--draft`` names; where one is wanted the demo target brings its own."""
    if args.draft == "demo" or (args.draft is None and args.target == "demo" and want_draft):
        return DEMO_DRAFT
    return args.draft


def load_models(
    args: argparse.Namespace, want_draft: bool, mesh: dict[str, int] | None = None
) -> tuple[LM, LM | None]:
    """The target, and the draft or None.

    On a mesh the target is split; a draft that cannot be is whole on each device.

    Raises:
      ModelError: one of them cannot be loaded.
      OptionError: there are not as many devices.
    """
    draft = draft_name(args, want_draft)
    devices = make_mesh(**mesh) if mesh else None
    load = functools.partial(
        lm.load,
        dtype=args.dtype,
        pickles=args.pickles,
        mesh=devices,
        pass_width=args.pass_width,
        quantize=args.quantize,
        cache_dtype=args.cache_dtype,
    )
    target = lm.TARGET.parse("target", load(args.target))
    if draft is None:
        return target, None
    if draft.startswith(lm.SELF):
        return target, lm.own_draft(target, draft)
    return target, load(draft, split=devices is None or lm.can_split(draft, devices))


def device_memory() -> int:
    """Bytes of the first device's memory; the machine's where the device does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def use_compilation_cache() -> bool:
    """Keeps compiled programs across starts; ``SPECJAX_CACHE_DIR=`` (empty) turns it off.

    Returns whether there is nothing to reuse yet, so that this start will compile.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = os.environ.get("SPECJAX_CACHE_DIR", str(Path(base) / "specjax" / "xla"))
    if not directory:
        return True
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return not Path(directory).is_dir() or not any(Path(directory).iterdir())
