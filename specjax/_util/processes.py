"""Runs of several processes: joining them, what they must agree on, and who writes.

Every process runs the same program; arrays span the devices of all of them. In a run of one process
everything here returns at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from specjax._util.errors import InputError
from specjax._util.program import Place

T = TypeVar("T")
BY_CLUSTER = "cluster"  # SLURM, Open MPI, Kubernetes and TPU pods tell each process its place
_MESSAGE_BYTES = 512  # of an error that is sent to the other processes


def join(where: str) -> None:
    """Joins the run: ``HOST:PORT,COUNT,INDEX``, the first process's address, or ``cluster``.

    Must come before anything uses a device.

    Raises:
      InputError: another form, or the processes do not find each other.
    """
    try:
        if where == BY_CLUSTER:
            jax.distributed.initialize()
            return
        place = Place.parse(where)
        jax.distributed.initialize(place.address, place.count, place.index)
    except (ValueError, RuntimeError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(
            f"--distributed {where}: expected {Place.FORM}, or "
            f"{BY_CLUSTER} under a cluster manager ({first})"
        ) from None


def leads() -> bool:
    """Whether this process writes metrics, exports and summaries; checkpoints are by all."""
    return jax.process_index() == 0


def any_of(flag: bool) -> bool:
    """Whether ``flag`` is true in any process; every process gets the same answer."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def of_first(value: np.ndarray) -> np.ndarray:
    """What process 0 has, in every process."""
    return value if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(value)


def raise_everywhere(work: Callable[[], T]) -> T:
    """``work()``; where it fails in one process, every process raises.

    Without this the others would wait for the failed one until their connection times out.

    Raises:
      InputError: the process's own, or which other process failed and why.
    """
    if jax.process_count() == 1:
        return work()
    error = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    said = str(error or "").encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    failed = multihost_utils.process_allgather(np.asarray(error is not None))
    texts = multihost_utils.process_allgather(np.frombuffer(said, np.uint8))
    if error is not None:
        raise error
    for index in np.flatnonzero(failed):
        text = bytes(texts[index]).rstrip(b"\0").decode(errors="replace")
        raise InputError(f"process {index} failed: {text}")
    return result


def first_then_all(work: Callable[[], T]) -> T:
    """``work()`` in process 0, then in the others, which find what it has written.

    Raises:
      InputError: as :func:`raise_everywhere`.
    """
    result = raise_everywhere(lambda: work() if leads() else None)
    others = raise_everywhere(lambda: None if leads() else work())
    return result if leads() else others


def agree(**facts: Any) -> None:
    """Checks that every process has the same value under each name.

    Raises:
      InputError: names the first fact that differs and the processes that differ from the first.
    """
    if jax.process_count() == 1:
        return
    digests = [hashlib.sha256(json.dumps(fact, default=vars).encode()) for fact in facts.values()]
    mine = np.stack([np.frombuffer(digest.digest(), np.uint8) for digest in digests])
    of_all = multihost_utils.process_allgather(mine)
    for place, name in enumerate(facts):
        others = np.flatnonzero((of_all[:, place] != of_all[0, place]).any(axis=1))
        if len(others):
            raise InputError(
                f"processes disagree on {name}: {', '.join(map(str, others))} against process 0; "
                "start every one with the same arguments, config, files and package versions"
            )
