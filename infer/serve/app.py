"""The HTTP side: routes, limits and errors.

Handlers run in the event loop. A handler turns the body into a submission
(:mod:`infer.serve.admission`), hands it to the engine's thread, and sends what comes back
(:mod:`infer.serve.answers`). If a client goes away, its submission is canceled.
"""

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
from infer.serve.metrics import PrometheusMetrics
from infer.serve.schemas import Body, ChatBody, CompletionBody, read
from specjax._util.errors import SpecjaxError, one_line
from specjax.runtime.output import Piece

BODY_SECONDS = 30.0  # a client must send its request within this time
# A body above the limit is still read, up to this many times the limit, and dropped. Otherwise a
# client that is still sending would not see the error.
MAX_DISCARDED = 32
CLIENT_LEFT = 499  # nobody reads this status; the metrics count it
# The page is one file, so the browser may load nothing else.
CONTENT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {"Content-Security-Policy": CONTENT_POLICY, "X-Content-Type-Options": "nosniff"}
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """An error answer in OpenAI's form; ``headers`` are HTTP headers with _ for -."""

    def __init__(self, status: int, message: object, code: str | None = None, **headers: str):
        self.status = status
        self.message = one_line(message)
        self.code = code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def object(self) -> dict[str, Any]:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": self.message,
            "type": ERROR_TYPES.get(self.status, default),
            "param": None,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> Response:
        return json_response(self.object, self.status, self.headers)


class OutputQueue:
    """Carries one submission's pieces from the device's thread into the event loop."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        # None: the client went away.
        self._events: asyncio.Queue[tuple[int, Piece | Exception] | None] = asyncio.Queue()

    def on_output(self, number: int, piece: Piece | Exception) -> None:
        """Adds a piece; called in the device's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and so are its connections
            self._loop.call_soon_threadsafe(self._events.put_nowait, (number, piece))

    def client_left(self, *_: object) -> None:
        """Ends :meth:`pieces`; called in the event loop."""
        self._events.put_nowait(None)

    async def pieces(self, answer: Answer) -> AsyncIterator[tuple[int, Piece]]:
        """Row numbers and pieces, until the answer is complete or its client went away.

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
    """Server-sent events; ``cancel`` is called when they end, or when the client goes away."""

    def __init__(self, events: AsyncIterator[bytes], cancel: Callable[[], None]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._cancel = cancel

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._cancel()


class Server:
    """The handlers of all routes."""

    def __init__(
        self,
        admission: Admission,
        engine: EngineThread,
        metrics: PrometheusMetrics,
        max_body: int,
        api_key: str | None,
    ):
        self.admission = admission
        self._engine = engine
        self._metrics = metrics
        self._max_body = max_body
        self._api_key = api_key

    def app(self) -> FastAPI:
        """The FastAPI application, with all routes and error handlers."""
        # FastAPI's pages of documentation would load scripts from other sites.
        app = FastAPI(title="specjax", openapi_url=None, docs_url=None, redoc_url=None)
        with_key = [Depends(self._check_key)]
        add = app.add_api_route
        add("/v1/completions", self._completions, methods=["POST"], dependencies=with_key)
        add("/v1/chat/completions", self._chats, methods=["POST"], dependencies=with_key)
        add("/v1/models", self._list_models, dependencies=with_key)
        add("/v1/models/{name:path}", self._show_model, dependencies=with_key)
        add("/metrics", self._show_metrics, dependencies=with_key)
        add("/health", self._health)
        add("/", self._page)
        for kind in (Refusal, SpecjaxError, HTTPException, Exception):
            app.add_exception_handler(kind, self._refuse)
        return app

    # --- routes --------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionBody)

    async def _chats(self, request: Request) -> Response:
        return await self._answer(request, ChatBody)

    async def _list_models(self) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def _show_model(self, name: str) -> Response:
        if name != self.admission.name:
            raise NoSuchModel(f"model {name!r}: this server has {self.admission.name!r}")
        return json_response(self._model())

    async def _show_metrics(self) -> Response:
        return Response(self._metrics.page(), media_type="text/plain; version=0.0.4")

    async def _health(self) -> Response:
        if not self._engine.alive:
            raise Refusal(503, "the device's thread has ended; restart the server")
        return json_response({"status": "ok"})

    async def _page(self) -> Response:
        page = resources.files("infer.serve").joinpath("page.html").read_bytes()
        return Response(page, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    def _model(self) -> dict[str, Any]:
        """The served model, as OpenAI describes one, and the defaults and limits of requests."""
        admission = self.admission
        return {
            "id": admission.name,
            "object": "model",
            "created": 0,
            "owned_by": "specjax",
            "method": admission.method,
            "draft": admission.draft.source if admission.draft else None,
            "max_prompt_tokens": admission.bounds.prompt,
            "max_output_tokens": admission.max_output,
        }

    # --- completions and chats -----------------------------------------------------------------

    async def _answer(self, request: Request, kind: type[Body]) -> Response:
        """Answers a completion or a chat: as a stream, or whole once all of its rows have ended."""
        body = read(kind, await self._read_body(request))
        output = OutputQueue()
        # Long texts and templates take a while, and the event loop must not wait for them.
        submission = await asyncio.to_thread(self.admission.make_submission, body, output.on_output)
        answer = Answer(submission, body, self.admission.name)
        self._submit(submission)

        def cancel() -> None:
            if not answer.complete:
                self._engine.cancel(submission)

        if body.stream:
            self._metrics.answered(request.url.path, 200)
            return EventStream(_events(output, answer), cancel)

        disconnect = asyncio.create_task(_wait_for_disconnect(request))
        disconnect.add_done_callback(output.client_left)
        try:
            async for number, piece in output.pieces(answer):
                answer.add_piece(number, piece)
        finally:
            disconnect.cancel()
            cancel()

        status = 200 if answer.complete else CLIENT_LEFT
        self._metrics.answered(request.url.path, status)
        if not answer.complete:
            return Response(status_code=CLIENT_LEFT)
        # Echoes of long prompts take a while to build.
        return json_response(await asyncio.to_thread(answer.full_response))

    def _submit(self, submission: Submission) -> None:
        try:
            self._engine.submit(submission)
        except QueueFull:
            message = "too many requests wait; try again in a moment"
            raise Refusal(429, message, "queue_full", retry_after="1") from None
        except Closed:
            raise Refusal(503, "the server is about to end") from None

    async def _read_body(self, request: Request) -> bytes:
        """The request's body.

        Raises:
          Refusal: it is not declared as JSON, is larger than ``max_body``, or comes too slowly.
        """
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # Pages of other sites cannot send this type without the server's consent.
        if content_type != "application/json":
            raise Refusal(415, "expected a body of JSON, and Content-Type: application/json")

        try:
            async with asyncio.timeout(BODY_SECONDS):
                data, size = await self._receive(request)
        except TimeoutError:
            message = f"the body did not come within {BODY_SECONDS:g} s"
            raise Refusal(408, message, connection="close") from None
        except ClientDisconnect:
            raise Refusal(CLIENT_LEFT, "the client has left") from None

        if size > self._max_body:
            message = f"the body is larger than {self._max_body} bytes"
            raise Refusal(413, message, "body_too_large", connection="close")
        return data

    async def _receive(self, request: Request) -> tuple[bytes, int]:
        """The body up to ``max_body``, and how many bytes came."""
        size = 0
        data = bytearray()
        async for chunk in request.stream():
            size += len(chunk)
            if size <= self._max_body:
                data += chunk
            elif size > MAX_DISCARDED * self._max_body:
                break
        return bytes(data), size

    async def _check_key(self, request: Request) -> None:
        """Refuses a request without the API key, if the server has one."""
        if self._api_key is None:
            return
        given = request.headers.get("authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, f"Bearer {self._api_key}".encode()):
            raise Refusal(401, "wrong or no API key: send it as a bearer token", "invalid_api_key")

    async def _refuse(self, request: Request, error: Exception) -> Response:
        """Any error as an answer. The traceback goes to the log alone."""
        refusal = _refusal(error)
        self._metrics.answered(_route_path(request), refusal.status)
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


def _route_path(request: Request) -> str:
    """The route's path, as a label of metrics.

    All paths without a route share one label: clients could invent any number of them.
    """
    route = request.scope.get("route")
    return getattr(route, "path", "other")


async def _wait_for_disconnect(request: Request) -> None:
    """Returns when the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(output: OutputQueue, answer: Answer) -> AsyncIterator[bytes]:
    """The answer as server-sent events."""
    try:
        async for number, piece in output.pieces(answer):
            chunk = answer.add_piece(number, piece)
            if chunk is not None:
                yield _event(chunk)
        if answer.complete:
            usage = answer.usage_chunk()
            if usage is not None:
                yield _event(usage)
            yield b"data: [DONE]\n\n"
    except Refusal as refusal:
        yield _event(refusal.object)


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON in ASCII: a request may hold half of a surrogate pair, which UTF-8 cannot encode."""
    data = json.dumps(value).encode()
    return Response(data, status, headers, media_type="application/json")
