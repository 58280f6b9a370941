"""Models of the Hugging Face hub: their ids, and which files of a repository are downloaded.

Downloads are huggingface_hub's: it shows progress, continues what was broken off, and keeps files
in its cache.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from specjax._util.errors import ModelError, errors_as
from specjax.models.hf.files import read_weight_map
from specjax.models.hf.layout import INDEX, WEIGHTS
from specjax.models.hf.pickles import PICKLE, PICKLE_INDEX

SAFETENSORS = "model*.safetensors"
PICKLES = "pytorch_model*.bin"
SKIPPED = "*/*"  # subfolders hold other formats of the same weights


def is_id(name: str) -> bool:
    """Whether a name has the form of an id, ``ORGANIZATION/NAME`` or ``ORGANIZATION/NAME@REV``."""
    return not name.startswith((".", "/", "~")) and name.partition("@")[0].count("/") == 1


def with_revision(name: str, revision: str) -> str:
    """An id with the revision: a branch, a tag or a commit.

    Raises:
      ModelError: the name is no id, or has a revision already.
    """
    if not is_id(name) or "@" in name or Path(name).exists():
        raise ModelError(
            f"revision={revision}: {name} has no revisions; they are of ids on the hub, such as "
            "ORGANIZATION/NAME"
        )
    return f"{name}@{revision}"


def download(name: str, files: Sequence[str]) -> Path:
    """The local directory of an id, with those of its files that match a pattern of ``files``.

    Of weights only one form is downloaded. ``SAFETENSORS`` among the patterns means one file if
    the repository has it, or else the shards. ``PICKLES`` are taken only where there are no
    safetensors.

    Raises:
      ModelError: the hub does not give it.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    get = functools.partial(snapshot_download, repository, ignore_patterns=[SKIPPED])
    small = [pattern for pattern in files if pattern not in (SAFETENSORS, PICKLES)]
    forms = []
    if SAFETENSORS in files:
        forms.append((WEIGHTS, INDEX))
    if PICKLES in files:
        forms.append((PICKLE, PICKLE_INDEX))

    with errors_as(f"{name}: no such directory here, and the hub did not give it"):
        wanted = [*small, forms[0][0]] if forms else small
        path = Path(get(revision=revision or None, allow_patterns=wanted))
        for single, index in forms:
            # The first call has resolved the revision: a branch may move between two calls.
            get_more = functools.partial(get, revision=path.name)
            if not (path / single).exists():
                shards = _shards(path / index, single)
                get_more(allow_patterns=[single, index, *shards])
            if (path / index).exists() or any(path.glob(single.replace(".", "*.", 1))):
                break  # one form of the weights is enough
    return path


def _shards(index: Path, single: str) -> list[str]:
    """Patterns of the files that hold the weights, beside the ``single`` one that would."""
    if index.exists():
        return sorted(set(read_weight_map(index).values()))
    stem, _, ending = single.rpartition(".")
    return [f"{stem}-?????-of-?????.{ending}"]
