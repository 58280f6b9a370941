"""The HTTP side: routes, limits and errors, between the scheduler and its clients."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from infer.serve.admission import Admission, NoSuchModel, TooLong
from infer.serve.answers import Answer
from infer.serve.engine_thread import Closed, EngineThread, QueueFull, Submission
from infer.serve.meter import PrometheusMetrics
from infer.serve.schemas import Body, ChatBody, CompletionBody, read
from specjax._util.errors import SpecjaxError, one_line
from specjax.runtime.output import Piece

BODY_SECONDS = 30.0  # for a client to send its request in
THROWN_AWAY = 32  # times the largest body: so much is read so that a client hears why, no more
GONE = 499  # nobody reads this answer
# The page is one file: whatever else it would load is refused by the browser.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
POLICY += "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PAGE_HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(self, status: int, message: object, code: str | None = None, **headers: str):
        self.status, self.message, self.code = status, one_line(message), code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def object(self) -> dict[str, Any]:
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = KINDS.get(self.status, usual)
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}

    def response(self) -> Response:
        return answer_json(self.object, self.status, self.headers)


class Ticket:
    """What a request waits at: pieces from the scheduler's thread, and that its client has left."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Piece | Exception] | None] = asyncio.Queue()

    def on_output(self, number: int, piece: Piece | Exception) -> None:
        """Called in the scheduler's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its clients with it
            self._loop.call_soon_threadsafe(self._events.put_nowait, (number, piece))

    def leave(self, *_: object) -> None:
        """Called in the event loop: there is nobody to wait any more."""
        self._events.put_nowait(None)

    async def pieces(self, answer: Answer) -> AsyncIterator[tuple[int, Piece]]:
        """The answer's pieces until it is complete, or its client has left.

        Raises:
          Refusal: decoding failed.
        """
        while not answer.complete:
            event = await self._events.get()
            if event is None:
                return
            number, piece = event
            if isinstance(piece, Exception):
                raise Refusal(500, "decoding failed; the server's log says why", "decoding_failed")
            yield number, piece


class EventStream(StreamingResponse):
    """Server-sent events that end with their client: ``leave`` is called in any case."""

    def __init__(self, events: AsyncIterator[bytes], leave: Callable[[], None]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._leave = leave

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


class Server:
    """The routes' functions, and what they share."""

    def __init__(
        self,
        admission: Admission,
        scheduler: EngineThread,
        meter: PrometheusMetrics,
        most_bytes: int,
        key: str | None,
    ):
        self.admission, self._scheduler, self._meter = admission, scheduler, meter
        self._most_bytes, self._key = most_bytes, key

    def app(self) -> FastAPI:
        """The application."""
        # Its pages of documentation would load scripts from elsewhere.
        app = FastAPI(title="specjax", openapi_url=None, docs_url=None, redoc_url=None)
        known = [Depends(self._know)]
        add = app.add_api_route
        add("/v1/completions", self._completions, methods=["POST"], dependencies=known)
        add("/v1/chat/completions", self._chats, methods=["POST"], dependencies=known)
        add("/v1/models", self._models, dependencies=known)
        add("/v1/models/{name:path}", self._model, dependencies=known)
        add("/metrics", self._metrics, dependencies=known)
        add("/health", self._health)
        add("/", self._page)
        app.add_exception_handler(Refusal, self._refuse)
        app.add_exception_handler(SpecjaxError, self._refuse)
        app.add_exception_handler(HTTPException, self._refuse)
        app.add_exception_handler(Exception, self._refuse)
        return app

    # --- routes --------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionBody)

    async def _chats(self, request: Request) -> Response:
        return await self._answer(request, ChatBody)

    async def _models(self) -> Response:
        return answer_json({"object": "list", "data": [self._described()]})

    async def _model(self, name: str) -> Response:
        if name != self.admission.name:
            raise NoSuchModel(f"model {name!r}: this server has {self.admission.name!r}")
        return answer_json(self._described())

    async def _metrics(self) -> Response:
        return Response(self._meter.page(), media_type="text/plain; version=0.0.4")

    async def _health(self) -> Response:
        if not self._scheduler.alive:
            raise Refusal(503, "the device's thread has ended; restart the server")
        return answer_json({"status": "ok"})

    async def _page(self) -> Response:
        page = resources.files("infer.serve").joinpath("page.html").read_bytes()
        return Response(page, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    def _described(self) -> dict[str, Any]:
        mine = self.admission
        return {
            "id": mine.name,
            "object": "model",
            "created": 0,
            "owned_by": "specjax",
            "method": mine.method,
            "draft": mine.draft.source if mine.draft else None,
            "max_prompt_tokens": mine.bounds.prompt,
            "max_output_tokens": mine.max_output,
        }

    # --- an answer -----------------------------------------------------------------------------

    async def _answer(self, request: Request, kind: type[Body]) -> Response:
        body = read(kind, await self._data(request))
        ticket = Ticket()
        work = await asyncio.to_thread(self.admission.work, body, ticket.on_output)
        answer = Answer(work, body, self.admission.name)
        self._submit(work)

        def leave() -> None:
            if not answer.complete:
                self._scheduler.leave(work)

        if body.stream:
            self._meter.answered(request.url.path, 200)
            return EventStream(_events(ticket, answer), leave)
        watch = asyncio.create_task(_left(request))
        watch.add_done_callback(ticket.leave)
        try:
            async for number, piece in ticket.pieces(answer):
                answer.take(number, piece)
        finally:
            watch.cancel()
            leave()
        status = 200 if answer.complete else GONE
        self._meter.answered(request.url.path, status)
        if not answer.complete:
            return Response(status_code=GONE)
        return answer_json(await asyncio.to_thread(answer.whole))  # long echoes take a while

    def _submit(self, work: Submission) -> None:
        try:
            self._scheduler.submit(work)
        except QueueFull:
            said = "too many requests wait; try again in a moment"
            raise Refusal(429, said, "queue_full", retry_after="1") from None
        except Closed:
            raise Refusal(503, "the server is about to end") from None

    async def _data(self, request: Request) -> bytes:
        """The body, if it is JSON of a size in reason."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which no page of another site may send
            raise Refusal(415, "expected a body of JSON, and Content-Type: application/json")
        most, size, data = self._most_bytes, 0, bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= most:
                        data += chunk
                    elif size > THROWN_AWAY * most:
                        break
        except TimeoutError:
            said = f"the body did not come within {BODY_SECONDS:g} s"
            raise Refusal(408, said, connection="close") from None
        except ClientDisconnect:
            raise Refusal(GONE, "the client has left") from None
        if size > most:
            said = f"the body is larger than {most} bytes"
            raise Refusal(413, said, "body_too_large", connection="close")
        return bytes(data)

    async def _know(self, request: Request) -> None:
        """Lets in who has the key, where there is one."""
        if self._key is None:
            return
        said = request.headers.get("authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(said, f"Bearer {self._key}".encode()):
            raise Refusal(401, "wrong or no API key: send it as a bearer token", "invalid_api_key")

    async def _refuse(self, request: Request, error: Exception) -> Response:
        """Any error as an answer; the log alone gets more of it."""
        refusal = _refusal(error)
        self._meter.answered(_known_path(request), refusal.status)
        return refusal.response()


def _refusal(error: Exception) -> Refusal:
    if isinstance(error, Refusal):
        return error
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, error.detail)
    if isinstance(error, NoSuchModel):
        return Refusal(404, error, "model_not_found")
    if isinstance(error, TooLong):
        return Refusal(400, error, "context_length_exceeded")
    if isinstance(error, SpecjaxError):
        return Refusal(400, error, "invalid_value")
    return Refusal(500, "something failed; the server's log says what")


def _known_path(request: Request) -> str:
    """The path of a route: what clients make up is no label of a counter."""
    route = request.scope.get("route")
    return getattr(route, "path", "other")


async def _left(request: Request) -> None:
    """Returns when the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(ticket: Ticket, answer: Answer) -> AsyncIterator[bytes]:
    """The answer as server-sent events."""
    try:
        async for number, piece in ticket.pieces(answer):
            chunk = answer.take(number, piece)
            if chunk is not None:
                yield _event(chunk)
        if answer.complete:
            last = answer.last()
            if last is not None:
                yield _event(last)
            yield b"data: [DONE]\n\n"
    except Refusal as refusal:
        yield _event(refusal.object)


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def answer_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON in ASCII: half of a surrogate pair, which a request may hold, has no UTF-8."""
    data = json.dumps(value).encode()
    return Response(data, status, headers, media_type="application/json")
