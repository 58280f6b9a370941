"""Compiles the kernel for CPUs on the user's machine, once, and gives its functions to XLA.

The library lies in the user's cache directory. Its name has a digest of the source, the compiler,
its options and the CPU, so that any change makes another file. Without a C++ compiler there is no
kernel, and XLA computes all products.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import threading
from pathlib import Path
from typing import NamedTuple

import jax

from specjax._util.files import CACHE_VARIABLE, aside, program_cache, read_file

SOURCE = Path(__file__).with_name("product.cc")
COMPILERS = ("c++", "g++", "clang++")
OPTIONS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",  # sums round alike, whatever code the compiler makes of a loop
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
)
FUNCTIONS = {"dense": "SpecjaxDenseProduct", "grouped": "SpecjaxGroupedProduct"}
SECONDS = 120  # that a compiler may take
_LOCK = threading.Lock()


class Kernels(NamedTuple):
    """The names under which XLA knows the kernel's functions, or why there are none."""

    names: dict[str, str]
    problem: str | None = None


def kernels() -> Kernels:
    """The kernel's functions; the first call of a process loads them, and may compile them."""
    with _LOCK:
        return _kernels()


@functools.cache
def _kernels() -> Kernels:
    try:
        library = _library()
        return Kernels(_register(library))
    except (OSError, AttributeError, RuntimeError) as error:
        return Kernels({}, str(error))


def _library() -> Path:
    """The compiled library, beside XLA's compiled programs.

    Raises:
      RuntimeError: there is no compiler, it fails, or there is no directory for its output.
      OSError: the library cannot be written.
    """
    directory = program_cache("kernels")
    if directory is None:
        raise RuntimeError(f"no directory to keep it in: {CACHE_VARIABLE} names one")
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise RuntimeError(f"no C++ compiler: none of {', '.join(COMPILERS)} is installed")
    command = [compiler, *OPTIONS, "-I", jax.ffi.include_dir()]
    path = directory / f"product-{_digest(command)}.so"
    if not path.exists():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Two processes may both compile it. Each renames a whole file.
        with aside(path) as scratch:
            _run([*command, str(SOURCE), "-o", str(scratch)])
    if path.stat().st_uid != os.getuid():
        raise RuntimeError(f"{path} belongs to another user")
    return path


def _digest(command: list[str]) -> str:
    """A digest of all that a compiled library depends on."""
    parts = [*command, _run([command[0], "--version"]), jax.__version__, _cpu()]
    digest = hashlib.sha256(read_file(SOURCE))
    for part in parts:
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    """What the CPU can do: a cache directory may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return f"{platform.machine()} {platform.processor()}"
    features = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join(sorted(set(features)))


def _run(command: list[str]) -> str:
    """The output of a command, which is run without a shell.

    Raises:
      RuntimeError: it fails or takes too long.
    """
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=True,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name} took more than {SECONDS} seconds") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{name} failed with exit code {error.returncode}") from None
    return done.stdout


def _register(library: Path) -> dict[str, str]:
    """Gives XLA the functions of a library.

    Their names have its digest: a compiled program that JAX kept on disk calls them by name.
    """
    loaded = ctypes.CDLL(str(library))
    names = {}
    for kind, symbol in FUNCTIONS.items():
        name = f"specjax_{kind}_{library.stem}"
        capsule = jax.ffi.pycapsule(getattr(loaded, symbol))
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
        names[kind] = name
    return names
