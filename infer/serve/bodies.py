"""Reads the bodies of requests, with limits of their type, size and time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.requests import ClientDisconnect

from infer.serve.refusals import Refusal

BODY_SECONDS = 30.0  # a client must send its request within this time
# A body above the limit is still read, up to this many times the limit, and dropped. Otherwise a
# client that is still sending would not see the error.
MAX_DISCARDED = 32
# Bodies of the largest size that may be in memory until they are parsed. Beyond, only small ones
# are read.
MAX_BODIES = 64
SMALL = 2**16  # bytes
CLIENT_LEFT = 499  # nobody reads this status; the metrics count it


class Bodies:
    """The bodies that are not parsed yet, each of at most ``max_body`` bytes."""

    def __init__(self, max_body: int):
        self._max_body = max_body
        self._held = 0  # their bytes

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """A request's body, which counts as held until the block ends.

        Raises:
          Refusal: it is not declared as JSON, is larger than ``max_body``, or comes too slowly.
        """
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # Pages of other sites cannot send this type without the server's consent.
        if content_type != "application/json":
            raise Refusal(415, "expected a body of JSON, and Content-Type: application/json")

        data = bytearray()
        try:
            size = await self._receive_in_time(request, data)
            if size > self._max_body:
                message = f"the body is larger than {self._max_body} bytes"
                raise Refusal(413, message, "body_too_large", connection="close")
            yield data
        finally:
            self._held -= len(data)

    async def _receive_in_time(self, request: Request, data: bytearray) -> int:
        """As :meth:`_receive`; refuses a body that comes too slowly, or whose client leaves."""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await self._receive(request, data)
        except TimeoutError:
            message = f"the body did not come within {BODY_SECONDS:g} s"
            raise Refusal(408, message, connection="close") from None
        except ClientDisconnect:
            raise Refusal(CLIENT_LEFT, "the client has left") from None

    async def _receive(self, request: Request, data: bytearray) -> int:
        """Fills ``data`` with the body up to ``max_body``; returns how many bytes came."""
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size <= self._max_body:
                data += chunk
                self._held += len(chunk)
            elif size > MAX_DISCARDED * self._max_body:
                break
            if len(data) > SMALL and self._held > MAX_BODIES * self._max_body:
                message = "too many large bodies at once; try again in a moment"
                raise Refusal(503, message, retry_after="1", connection="close")
        return size
