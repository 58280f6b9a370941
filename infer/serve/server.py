"""Starts the server: loads the models, starts the engine's thread, answers HTTP until a signal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import os
import queue
import signal
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from infer.loading import device_memory, load_models, use_compilation_cache
from infer.serve.admission import Admission
from infer.serve.app import Server
from infer.serve.commands import KEY_VARIABLE
from infer.serve.engine_thread import EngineThread
from infer.serve.metrics import PrometheusMetrics
from infer.serve.schemas import CompletionBody
from specjax._util.errors import InputError, OptionError
from specjax._util.program import say
from specjax.lm import LM
from specjax.registry import method
from specjax.runtime.generate import num_slots

BATCH_MEMORY = 0.5  # share of the device's memory for the batch slots of all methods
BACKLOG = 2048  # connections that the system keeps until they are accepted


def serve(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or an interrupt; returns the exit code.

    Raises:
      SpecjaxError: an argument is wrong, or the default method fails.
    """
    api_key = args.api_key or os.environ.get(KEY_VARIABLE) or None
    spec = method(args.method) if args.method else None
    if spec:  # report wrong options before models load, which can take minutes
        spec.resolve(dict(args.set))
    with _bound_socket(args.host, args.port) as listener:
        use_compilation_cache()
        target, draft = load_models(args, spec is None or spec.needs_draft, args.mesh)
        with assembled(args, target, draft, api_key) as (server, engine):
            _decode_one(server.admission, engine)
            _answer_requests(server.app(), listener, args.drain, api_key)
    return 0


@contextlib.contextmanager
def assembled(
    args: argparse.Namespace, target: LM, draft: LM | None, api_key: str | None = None
) -> Iterator[tuple[Server, EngineThread]]:
    """The server of these models, and its engine, which runs until the block ends."""
    spec = method(args.method or ("speculative" if draft else "autoregressive"))
    spec.resolve(dict(args.set))
    admission = Admission(
        target=target,
        draft=draft,
        name=args.name or args.target,
        method=spec.name,
        defaults=dict(args.set),
        size=num_slots(target, args.batch_size, args.batch_size),
        max_prompt=args.max_prompt,
        max_output=min(args.max_output, target.config.max_position - 1),
        memory=int(device_memory() * BATCH_MEMORY) // args.max_methods,
        max_rows=args.queue,
    )
    metrics = PrometheusMetrics()
    engine = EngineThread(
        size=admission.size,
        bounds=admission.bounds,
        kept=args.prefixes,
        max_methods=args.max_methods,
        max_waiting=args.queue,
        metrics=metrics,
    )
    metrics.watch(engine)
    try:
        yield Server(admission, engine, metrics, args.max_body, api_key), engine
    finally:
        engine.close()


def _bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet.

    It is bound before models load, so that a port in use is reported at once.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of a name is too long
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--host {host} --port {port}: {reason}") from None
    return listener


def _decode_one(admission: Admission, engine: EngineThread) -> None:
    """Decodes two tokens with the default method, to compile it and to see that it works.

    Raises:
      OptionError: decoding failed.
    """
    pieces: queue.Queue = queue.Queue()
    token = next(iter(admission.target.eos_ids), 0)
    body = CompletionBody(prompt=[token], max_tokens=2)
    engine.submit(admission.make_submission(body, lambda number, piece: pieces.put(piece)))
    while True:
        piece = pieces.get()
        if isinstance(piece, Exception):
            raise OptionError(f"method {admission.method} failed: {piece}")
        if piece.row is not None:
            return


def _answer_requests(app: FastAPI, listener: socket.socket, drain: int, key: str | None) -> None:
    """Answers requests until a signal, then finishes the open ones for up to ``drain`` seconds."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=drain,
    )
    host, port = listener.getsockname()[:2]
    if key is None and not ipaddress.ip_address(host).is_loopback:
        say("infer.serve", f"other machines can reach {host}, and there is no key: see --api-key")
    url_host = f"[{host}]" if ":" in host else host
    # uvicorn raises the signal again after it has shut down. That must not kill the process,
    # which would then not exit with 0.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    listener.listen(BACKLOG)
    try:
        say("infer.serve", f"http://{url_host}:{port}")
        asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))
    finally:
        signal.signal(signal.SIGTERM, before)
