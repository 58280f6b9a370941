"""Runs of several processes: joining them, checking that they agree, and who writes.

Every process runs the same program; arrays span the devices of all of them. In a run of one process
every function here returns at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from specjax._util.errors import InputError
from specjax._util.program import Place

T = TypeVar("T")
BY_CLUSTER = "cluster"  # SLURM, Open MPI, Kubernetes and TPU pods tell each process its place
_MESSAGE_BYTES = 512  # of an error that is sent to the other processes


def join(where: str) -> None:
    """Joins the run: ``HOST:PORT,COUNT,INDEX`` with the first process's address, or ``cluster``.

    Call it before anything uses a device.

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
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(
            f"--distributed {where}: expected {Place.FORM}, or "
            f"{BY_CLUSTER} under a cluster manager ({first_line})"
        ) from None


def is_main_process() -> bool:
    """Whether this is process 0, which writes metrics, exports and summaries.

    Checkpoints are written by all processes.
    """
    return jax.process_index() == 0


def any_process(flag: bool) -> bool:
    """Whether ``flag`` is true in any process; every process gets the same answer."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def broadcast_from_main(value: np.ndarray) -> np.ndarray:
    """The value that process 0 has, in every process."""
    if jax.process_count() == 1:
        return value
    return multihost_utils.broadcast_one_to_all(value)


def raise_everywhere(work: Callable[[], T]) -> T:
    """``work()``; if it fails in one process, every process raises.

    Without this the others would wait for the failed one until their connection times out.

    Raises:
      InputError: which other process failed, and why. A process that failed itself raises its own
        error.
    """
    if jax.process_count() == 1:
        return work()
    error = None
    result = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    # Every process takes part in both gathers, also one that failed: else the others would hang.
    message = str(error or "").encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    failed = multihost_utils.process_allgather(np.asarray(error is not None))
    messages = multihost_utils.process_allgather(np.frombuffer(message, np.uint8))
    if error is not None:
        raise error
    for index in np.flatnonzero(failed):
        text = bytes(messages[index]).rstrip(b"\0").decode(errors="replace")
        raise InputError(f"process {index} failed: {text}")
    return cast(T, result)


def main_process_first(work: Callable[[], T]) -> T:
    """``work()`` in process 0 and then in the others, which find what it has written.

    Raises:
      InputError: as :func:`raise_everywhere`.
    """
    is_main = is_main_process()
    main_result = raise_everywhere(lambda: work() if is_main else None)
    other_result = raise_everywhere(lambda: None if is_main else work())
    return cast(T, main_result if is_main else other_result)


def check_agreement(**facts: Any) -> None:
    """Checks that every process has the same value under each name.

    Raises:
      InputError: names the first fact that differs, and the processes that differ from process 0.
    """
    if jax.process_count() == 1:
        return
    digests = [hashlib.sha256(json.dumps(fact, default=vars).encode()) for fact in facts.values()]
    ours = np.stack([np.frombuffer(digest.digest(), np.uint8) for digest in digests])
    everyones = multihost_utils.process_allgather(ours)  # [processes, facts, bytes]
    for number, name in enumerate(facts):
        differs = (everyones[:, number] != everyones[0, number]).any(axis=1)
        others = np.flatnonzero(differs)
        if len(others):
            raise InputError(
                f"processes disagree on {name}: {', '.join(map(str, others))} against process 0; "
                "start every one with the same arguments, config, files and package versions"
            )
