"""The HTTP side: routes, limits and errors.

Handlers run in the event loop. A handler turns the body into a submission
(:mod:`infer.serve.admission`), hands it to the engine's thread, and sends what comes back
(:mod:`infer.serve.answers`). If a client goes away, its submission is canceled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from importlib import metadata, resources
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from infer.serve.admission import Admission
from infer.serve.answers import Answer
from infer.serve.bodies import CLIENT_LEFT, Bodies
from infer.serve.engine_thread import Closed, EngineThread
from infer.serve.fairness import QueueFull, Workers
from infer.serve.guard import RequestGuard
from infer.serve.method_list import method_list
from infer.serve.metrics import PrometheusMetrics
from infer.serve.openapi import schema_of
from infer.serve.programs import TooManyNew
from infer.serve.refusals import Refusal, json_response, public, refusal_of
from infer.serve.schemas import Body, ChatBody, CompletionBody, read
from infer.serve.tokens import detokenize, tokenize
from infer.serve.variants import Submission
from specjax._util.errors import SpecjaxError
from specjax.lm import HUB_SNAPSHOT
from specjax.runtime.output import Piece
from specjax.text.chat import MAX_CHILDREN

# Threads that read bodies and tokenize texts; those for chats wait for a template's process.
TEXT_THREADS = max(2, min(8, (os.cpu_count() or 1) // 2))
READ = ["GET", "HEAD"]
# The page is one file, so the browser may load nothing else.
CONTENT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {"Content-Security-Policy": CONTENT_POLICY, "X-Content-Type-Options": "nosniff"}


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
    """The handlers of all routes.

    Args:
      max_body: bytes of a request's body.
      keys: API keys, one of which requests need if there are any.
      allowed_hosts: names by which clients may reach the server, beside localhost and addresses.
    """

    def __init__(
        self,
        admission: Admission,
        engine: EngineThread,
        metrics: PrometheusMetrics,
        max_body: int,
        keys: Sequence[str] = (),
        allowed_hosts: Sequence[str] = (),
    ):
        self.admission = admission
        self._engine = engine
        self._metrics = metrics
        self._bodies = Bodies(max_body)
        self._keys = keys
        self._allowed_hosts = allowed_hosts
        self._texts = Workers(TEXT_THREADS, "text")
        self._chats = Workers(MAX_CHILDREN, "chat")
        self._private = _private_paths(admission)
        self._methods = method_list(admission)

    def app(self) -> FastAPI:
        """The FastAPI application, with all routes and error handlers."""
        # FastAPI's pages of documentation would load scripts from other sites. Its redirects would
        # repeat the header Host, which anybody may choose.
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
        with_key = [Depends(self._check_key)]
        add = app.add_api_route
        add("/v1/completions", self._complete, methods=["POST"], dependencies=with_key)
        add("/v1/chat/completions", self._chat, methods=["POST"], dependencies=with_key)
        add("/tokenize", self._tokenize, methods=["POST"], dependencies=with_key)
        add("/detokenize", self._detokenize, methods=["POST"], dependencies=with_key)
        add("/v1/models", self._list_models, methods=READ, dependencies=with_key)
        add("/v1/models/{name:path}", self._show_model, methods=READ, dependencies=with_key)
        add("/v1/methods", self._list_methods, methods=READ, dependencies=with_key)
        add("/version", self._version, methods=READ, dependencies=with_key)
        add("/metrics", self._show_metrics, methods=READ, dependencies=with_key)
        add("/openapi.json", self._openapi, methods=READ)
        add("/health", self._health, methods=READ)
        add("/", self._page, methods=READ)
        for kind in (Refusal, QueueFull, SpecjaxError, HTTPException, Exception):
            app.add_exception_handler(kind, self._refuse)
        app.add_middleware(RequestGuard, allowed=self._allowed_hosts, any_host=bool(self._keys))
        return app

    # --- routes --------------------------------------------------------------------------------

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, CompletionBody, self._texts)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, ChatBody, self._chats)

    async def _tokenize(self, request: Request) -> Response:
        # Whether it is a chat is known only once it is parsed.
        return json_response(await self._parse(request, self._chats, tokenize, self.admission))

    async def _detokenize(self, request: Request) -> Response:
        return json_response(await self._parse(request, self._texts, detokenize, self.admission))

    async def _list_models(self) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def _show_model(self, name: str) -> Response:
        self.admission.check_model(name)
        return json_response(self._model())

    async def _list_methods(self) -> Response:
        chats = self.admission.target.tokenizer.chats
        methods = [
            {**one, "refused": one["refused"] and public(one["refused"], self._private)}
            for one in self._methods
        ]
        return json_response({"object": "list", "data": methods, "chats": chats})

    async def _version(self) -> Response:
        return json_response({"version": metadata.version("specjax")})

    async def _show_metrics(self) -> Response:
        return Response(self._metrics.page(), media_type="text/plain; version=0.0.4")

    async def _openapi(self) -> Response:
        return json_response(schema_of(self.admission.name))

    async def _health(self) -> Response:
        if not self._engine.alive:
            raise Refusal(503, "the engine's thread has ended; restart the server")
        return json_response({"status": "ok"})

    async def _page(self) -> Response:
        page = resources.files("infer.serve").joinpath("page.html").read_bytes()
        return Response(page, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    def _model(self) -> dict[str, Any]:
        """The served model, as OpenAI describes one, and the defaults and limits of requests."""
        admission = self.admission
        draft = None
        if admission.draft:
            draft = public(admission.draft.source, self._private)
        return {
            "id": admission.name,
            "object": "model",
            "created": 0,
            "owned_by": "specjax",
            "method": admission.method,
            "draft": draft,
            "max_model_len": admission.target.config.max_position,
            "max_prompt_tokens": admission.bounds.prompt,
            "max_output_tokens": admission.max_output,
        }

    # --- completions and chats -----------------------------------------------------------------

    async def _answer(self, request: Request, kind: type[Body], workers: Workers) -> Response:
        """Answers a completion or a chat: as a stream, or whole once all of its rows have ended."""
        client = self._client(request)
        output = OutputQueue()
        body, submission = await self._parse(
            request, workers, self._prepare, kind, output.on_output, client
        )
        answer = Answer(submission, body, self.admission.name, self.admission.tool_family)
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

    async def _parse(
        self, request: Request, workers: Workers, function: Callable[..., Any], *args: Any
    ) -> Any:
        """What ``function(*args, data)`` makes of a request's body, in a thread of ``workers``.

        Long texts and templates take a while, and the event loop must not wait for them.
        """
        async with self._bodies.read(request) as data:
            return await workers.run(self._client(request), function, *args, data)

    def _prepare(
        self, kind: type[Body], on_output: Callable, client: Hashable, data: bytes | bytearray
    ) -> tuple[Body, Submission]:
        """The parsed request and its submission."""
        body = read(kind, data)
        return body, self.admission.make_submission(body, on_output, client)

    def _submit(self, submission: Submission) -> None:
        try:
            self._engine.submit(submission)
        except TooManyNew:
            message = "too many new methods or options wait to be compiled; try again in a moment"
            raise Refusal(429, message, "queue_full", "method", retry_after="10") from None
        except Closed:
            raise Refusal(503, "the server is shutting down") from None

    # --- who asks ------------------------------------------------------------------------------

    async def _check_key(self, request: Request) -> None:
        """Refuses a request without one of the API keys, if the server has any."""
        if self._keys and self._key_number(request) is None:
            message = "wrong or no API key: send it as a bearer token"
            raise Refusal(401, message, "invalid_api_key", www_authenticate="Bearer")

    def _key_number(self, request: Request) -> int | None:
        """Which of the API keys a request has."""
        header = request.headers.get("authorization", "")
        scheme, _, given = header.partition(" ")
        if scheme.lower() != "bearer":
            return None
        token = given.strip().encode("latin-1", "replace")
        for number, key in enumerate(self._keys):
            if hmac.compare_digest(token, key.encode()):
                return number
        return None

    def _client(self, request: Request) -> Hashable:
        """Who shares one client's part of the server: an API key of several, or an address."""
        if len(self._keys) > 1:
            return self._key_number(request)
        return client_at(request.client.host if request.client else "")

    async def _refuse(self, request: Request, error: Exception) -> Response:
        """Any error as an answer. The traceback goes to the log alone."""
        if isinstance(error, QueueFull):
            message = "too many requests wait, of this client or of all; try again in a moment"
            refusal = Refusal(429, message, "queue_full", retry_after="1")
        else:
            refusal = refusal_of(error, self._private)
        self._metrics.answered(_route_path(request), refusal.status)
        return refusal.response()


def client_at(address: str) -> str:
    """An address as one client. Of IPv6 that is a network of 64 bits, as one household has."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    if parsed.ipv4_mapped is not None:  # a socket of both versions
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))


def _private_paths(admission: Admission) -> dict[str, str]:
    """Paths of the models, which clients do not see, and what they see instead.

    A tokenizer's source is the directory that was read, while a model's is the name that was given:
    ``~/model``, or an id of the hub.
    """
    shown = {}
    for model in filter(None, (admission.target, admission.draft)):
        tokenizer = model.tokenizer
        for path in (model.source, tokenizer.source if tokenizer else ""):
            snapshot = HUB_SNAPSHOT.search(path)
            if snapshot:
                shown[path] = f"{snapshot[1]}/{snapshot[2]}"
            folder = os.path.dirname(path.rstrip(os.sep))
            # The root says nothing, and slashes are in many messages.
            if folder.strip(os.sep) and os.path.isdir(os.path.expanduser(folder)):
                shown[os.path.join(folder, "")] = ""
    return shown


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
