"""HTTP connections, with limits on clients that have not sent a whole request.

uvicorn parses HTTP (with h11) and runs the application. :class:`Connection` adds what uvicorn does
not have: a deadline for headers and for answers that nobody reads, a limit of the connections that
keeps none of them waiting, and one for bodies in tiny chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from infer.serve.refusals import Refusal

HEADER_SECONDS = 10.0  # from the connection's first byte, or the last answer, to whole headers
READ_SECONDS = 60.0  # an answer that the client does not read for this long is dropped
LINGER_SECONDS = 1.0
MAX_HEADER_BYTES = 2**14
# A chunk of a body costs 20 µs of the event loop, whatever its size. Beyond some that are free,
# chunks need this size on average.
FREE_CHUNKS = 1024
SMALLEST_CHUNK = 64
OTHER_FILES = 128  # file descriptors that the process keeps for everything but connections


class HttpParser(h11.Connection):
    """The server's side of HTTP/1.1, which refuses a body that comes in tiny chunks."""

    def __init__(self):
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self._chunks = 0
        self._received = 0

    def next_event(self) -> Any:
        """The next event, as that of h11.

        Raises:
          RemoteProtocolError: what came is no HTTP, or the chunks are too small.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = 0
            self._received = 0
        if isinstance(event, h11.Data):
            self._chunks += 1
            self._received += len(event.data)
            if self._chunks > FREE_CHUNKS + self._received // SMALLEST_CHUNK:
                raise h11.RemoteProtocolError("the body comes in tiny chunks")
        return event


class Connection(H11Protocol):
    """One connection.

    At ``max_connections`` a new connection takes the place of the one that has waited longest
    without a whole request. So half-sent requests, however many, keep nobody out.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        max_connections: int,
        **rest: Any,
    ):
        super().__init__(config, server_state, app_state, **rest)
        self.conn = HttpParser()
        self._max_connections = max_connections
        self._waits_since = 0.0
        self._header_deadline: asyncio.TimerHandle | None = None
        self._read_deadline: asyncio.TimerHandle | None = None
        self._refused = False

    @property
    def waiting(self) -> bool:
        """Whether the server still waits for a request, or for the rest of one."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    # --- what asyncio and uvicorn call ---------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._waits_since = time.monotonic()
        self._watch_headers()
        if len(self.connections) > self._max_connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        self._watch_headers()

    def on_response_complete(self) -> None:
        self._waits_since = time.monotonic()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_deadline = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_deadline = _canceled(self._read_deadline)

    def connection_lost(self, exc: Exception | None) -> None:
        self._header_deadline = _canceled(self._header_deadline)
        self._read_deadline = _canceled(self._read_deadline)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """The answer to what is no HTTP; uvicorn's own is no JSON."""
        self._refuse(Refusal(400, "what came is no valid HTTP, or its chunks are too small"))

    # --- limits --------------------------------------------------------------------------------

    def _watch_headers(self) -> None:
        """Starts the deadline while headers are awaited, and stops it once they are there."""
        if self.conn.their_state is not h11.IDLE:
            self._header_deadline = _canceled(self._header_deadline)
        elif self._header_deadline is None:
            self._header_deadline = self.loop.call_later(HEADER_SECONDS, self._expire)

    def _expire(self) -> None:
        message = f"the headers did not come within {HEADER_SECONDS:g} s"
        self._refuse(Refusal(408, message))

    def _make_room(self) -> None:
        """Closes the connection that has waited longest, which may be this one."""
        waiting = [connection for connection in self.connections if connection.waiting]
        oldest = min(waiting, key=lambda connection: connection._waits_since)
        self.connections.discard(oldest)
        if oldest is self:
            message = "too many connections; try again in a moment"
            self._refuse(Refusal(503, message, retry_after="1"), linger=0)
        else:
            oldest.transport.abort()

    def _refuse(self, refusal: Refusal, linger: float = LINGER_SECONDS) -> None:
        """Answers without the application, and closes after ``linger`` seconds.

        The system drops an answer if the connection is closed while the client still sends.
        """
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        # Once an answer has begun, there cannot be another.
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return

        data = json.dumps(refusal.object).encode()
        headers = refusal.headers | {
            "content-type": "application/json",
            "content-length": str(len(data)),
            "connection": "close",
        }
        head = h11.Response(status_code=refusal.status, headers=list(headers.items()))
        for event in (head, h11.Data(data=data), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        if linger:
            self.transport.write_eof()
            self.loop.call_later(linger, self.transport.close)
        else:
            self.transport.close()


def _canceled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def connections_within(wanted: int) -> int:
    """How many connections the process can have open, up to ``wanted``.

    It raises the limit of open files as far as it may. At that limit accepting fails again and
    again, and each time asyncio writes to the log.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such limit
        import resource

        needed = wanted + OTHER_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < needed:
            possible = needed
            if hard != resource.RLIM_INFINITY:
                possible = min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
            return max(1, min(wanted, possible - OTHER_FILES))
    return wanted
