"""Data sets of the Hugging Face hub, as ``hf:NAME[:SPLIT]``: streamed, never in memory as a whole.

NAME is an id on the hub, or a directory of data files. SPLIT is ``train`` by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax._util.errors import InputError, errors_as

PREFIX = "hf:"
SPLIT = "train"


def is_on_hub(path: str | Path) -> bool:
    """Whether a source is a data set of the hub, and no file."""
    return str(path).startswith(PREFIX)


def hub_records(source: str) -> Iterator[dict[str, Any]]:
    """The rows of a data set, one at a time.

    Raises:
      InputError: the datasets library is missing, or there is no such data set or split.
    """
    name, split = _parse(source)
    try:
        import datasets
    except ImportError:
        raise InputError(
            f'reading {source} needs datasets: pip install "specjax[datasets]"'
        ) from None
    with errors_as(f"{source} cannot be read", InputError):
        rows = iter(datasets.load_dataset(name, split=split, streaming=True))
    while True:
        with errors_as(f"{source} cannot be read", InputError):
            row = next(rows, None)
        if row is None:
            return
        yield row


def hub_revision(source: str) -> str:
    """What tells whether a data set has changed: its commit; empty if that is not known."""
    name, _ = _parse(source)
    if Path(name).exists():
        return ""
    try:
        from huggingface_hub import HfApi

        return HfApi().dataset_info(name).sha or ""
    except Exception:  # without a network the shards are used as they are
        return ""


def _parse(source: str) -> tuple[str, str]:
    name, _, split = source.removeprefix(PREFIX).partition(":")
    if not name:
        raise InputError(f"{source}: expected hf:NAME or hf:NAME:SPLIT")
    return name, split or SPLIT
