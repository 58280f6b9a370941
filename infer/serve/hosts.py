"""The other processes of a model that spans several: the first one decides, the others follow.

Process 0 answers HTTP and has the engine's thread. All processes must start the same programs on
their devices in the same order. So before process 0 lets its devices do something, it tells the
others, and each does the same with objects of its own. They read the same results from their
devices, so what follows from those needs no message.

A message is the number of its bytes and a JSON object. No process runs code that another sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from specjax._util import peers
from specjax._util.errors import SpecjaxError
from specjax._util.program import FAILED, TERMINATED, say

SIZE = struct.Struct("<I")
STOP = b"s"  # from another process: it has got SIGTERM
GONE_SECONDS = 10.0  # until a process whose connection has closed is reported by its own watch
END = "end"

Message = dict[str, Any]


class Followers:
    """In process 0: what tells the other processes. Without others it does nothing.

    Args:
      sends: functions that send bytes, one for each of the other processes.
    """

    def __init__(self, sends: Iterable[Callable[[bytes], object]] = ()):
        self._sends = list(sends)
        self._lock = threading.Lock()
        self._notes: list[bytes] = []

    @property
    def exist(self) -> bool:
        """Whether there are other processes."""
        return bool(self._sends)

    def note(self, what: str, **about: Any) -> None:
        """Sends a message before the next one of :meth:`tell`; any thread may call it."""
        if self.exist:
            with self._lock:
                self._notes.append(_packed(what, about))

    def tell(self, what: str, **about: Any) -> None:
        """Sends a message, before the devices do what it says."""
        if not self.exist:
            return
        with self._lock:
            data = b"".join([*self._notes, _packed(what, about)])
            self._notes = []
            for send in self._sends:
                # If a process has died, its watch ends this one.
                with contextlib.suppress(OSError):
                    send(data)

    def end(self) -> None:
        """After an error of the device's work: ends all processes, which may not be in step."""
        if self.exist:
            say("infer.serve", "decoding failed, so all processes of the model end")
            os._exit(FAILED)


def _packed(what: str, about: Message) -> bytes:
    text = json.dumps({"what": what} | about).encode()
    return SIZE.pack(len(text)) + text


def lead(count: int, host: str | None) -> Followers:
    """In process 0: connects to the other ``count - 1`` processes.

    If one of them gets SIGTERM, this process gets it, too.

    Raises:
      SpecjaxError: a process has not connected.
    """
    connections = peers.connect(host)
    missing = sorted(set(range(1, count)) - set(connections))
    if missing:
        raise SpecjaxError(
            f"process {', '.join(map(str, missing))} cannot connect to process 0: let the machines "
            "reach each other at any port"
        )
    for connection in connections.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_pass_signals_on, args=(connection,), daemon=True).start()
    return Followers([connection.sendall for connection in connections.values()])


def _pass_signals_on(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(1):
            os.kill(os.getpid(), signal.SIGTERM)


class LeaderConnection:
    """In another process: its connection to process 0.

    Raises:
      SpecjaxError: there is no way to process 0.
    """

    def __init__(self, host: str | None):
        connection = peers.connect(host).get(0)
        if connection is None:
            raise SpecjaxError("no connection to process 0: let it be reached at any port")
        self._connection = connection

    def pass_signals_on(self) -> None:
        """From now on SIGTERM is for process 0, which answers what is open and then ends all."""
        signal.signal(signal.SIGTERM, self._terminated)

    def _terminated(self, *_: object) -> None:
        try:
            self._connection.sendall(STOP)
        except OSError:
            os._exit(TERMINATED)

    def receive(self) -> Message:
        """The next message; waits for it."""
        (size,) = SIZE.unpack(self._read(SIZE.size))
        return json.loads(self._read(size))

    def _read(self, size: int) -> bytes:
        try:
            data = self._connection.recv(size, socket.MSG_WAITALL)
            while 0 < len(data) < size:  # a signal came in between
                more = self._connection.recv(size - len(data), socket.MSG_WAITALL)
                if not more:
                    break
                data += more
        except OSError:
            data = b""
        if len(data) < size:
            time.sleep(GONE_SECONDS)
            say("infer.serve", "process 0 has ended")
            os._exit(FAILED)
        return data
