"""Runs one program that nobody has read, under limits; infer.bench.sandbox starts it as a script.

    python -I sandboxed.py LIMITS < program        LIMITS: a JSON object, see infer.bench.sandbox

Imports the standard library alone. Writes to stdout the limits' ``token`` if the program came to
its end, and before it a line of what the kernel let us take away.
"""

import ctypes
import json
import os
import resource
import sys

NOBODY = 65534
CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000
PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 8, 38
CAPABILITY_VERSION_3, CAP_DAC_READ_SEARCH = 0x20080522, 2


def main() -> None:
    limits = json.loads(sys.argv.pop())
    source = sys.stdin.buffer.read().decode()
    verdict = os.dup(1)
    offline = _renounce()
    _limit(limits)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.write(verdict, f"offline={int(offline)}\n".encode())
    # Installed packages are in reach even of isolated Python; ours are none of its business.
    sys.modules.update(dict.fromkeys(("infer", "specjax", "train")))
    exec(compile(source, "program", "exec"), {"__name__": "__main__"})
    # An exit, even with code 0, never comes here.
    os.write(verdict, limits["token"].encode())


def _renounce() -> bool:
    """Gives up root and the network; returns whether the network is gone."""
    libc = ctypes.CDLL(None)
    unshare = getattr(libc, "unshare", lambda flags: -1)
    offline = unshare(CLONE_NEWNET) == 0
    if os.geteuid() == 0:
        _become_nobody(libc)
    return offline or unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0


def _become_nobody(libc) -> None:
    """Changes the user; keeps the right to read where only root may read this Python's library."""
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)

    def keep(effective: int, permitted: int) -> None:
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        sets = (ctypes.c_uint32 * 6)(effective, permitted)  # the rest, inheritable too: none
        if libc.capset(header, sets):
            raise OSError("the kernel kept root's capabilities")

    read = 1 << CAP_DAC_READ_SEARCH
    keep(0, read)
    try:
        open(os.__file__, "rb").close()
        keep(0, 0)
    except PermissionError:
        keep(read, read)


def _limit(limits: dict) -> None:
    for kind, value in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["file_size"]),
        (resource.RLIMIT_NOFILE, limits["files"]),
        (resource.RLIMIT_NPROC, 1),  # itself: no process and no thread more
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    main()
