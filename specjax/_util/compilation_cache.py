"""The cache of compiled programs, which all programs that decode share."""

from __future__ import annotations

import os

import jax

from specjax._util.files import CACHE_VARIABLE, user_cache

MIN_COMPILE_SECONDS = 0.05  # programs that compile faster are not worth a file


def use_compilation_cache() -> bool:
    """Keeps compiled programs on disk for later runs; ``SPECJAX_CACHE_DIR=`` turns it off.

    ``SPECJAX_CACHE_DIR`` names the directory, or JAX's own ``JAX_COMPILATION_CACHE_DIR``.

    Returns whether the cache is empty or off, so that this run must compile.
    """
    cache = user_cache()
    usual = str(cache / "specjax" / "xla") if cache else ""
    of_jax = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    directory = os.environ.get(CACHE_VARIABLE, of_jax or usual)
    if not directory:
        return True
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    try:
        return not os.listdir(directory)
    except OSError:
        return True
