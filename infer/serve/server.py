"""From the command line to a server that answers: models, the device's thread, the socket."""

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

from infer.loading import device_memory, load_models, use_compilation_cache
from infer.serve.admission import Admission
from infer.serve.app import Server
from infer.serve.commands import KEY
from infer.serve.engine_thread import EngineThread
from infer.serve.meter import PrometheusMetrics
from infer.serve.schemas import CompletionBody
from specjax._util.errors import InputError, OptionError
from specjax._util.program import say
from specjax.lm import LM
from specjax.registry import method
from specjax.runtime.generate import num_slots

ROWS_SHARE = 0.5  # of the device's memory: what all flights together may take
BACKLOG = 2048  # connections that wait to be accepted


def serve(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or an interrupt; returns the exit code.

    Raises:
      SpecjaxError: the arguments cannot be met.
    """
    key = args.api_key or os.environ.get(KEY) or None
    spec = method(args.method) if args.method else None
    if spec:  # said before models load
        spec.resolve(dict(args.set))
    with _listening(args.host, args.port) as listener:
        use_compilation_cache()
        target, draft = load_models(args, spec is None or spec.needs_draft, args.mesh)
        with assembled(args, target, draft, key) as (server, scheduler):
            _try(server.admission, scheduler)
            _answer(server.app(), listener, args.drain, key)
    return 0


@contextlib.contextmanager
def assembled(
    args: argparse.Namespace, target: LM, draft: LM | None, key: str | None = None
) -> Iterator[tuple[Server, EngineThread]]:
    """The server's parts for these models, its thread at work until the end."""
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
        memory=int(device_memory() * ROWS_SHARE) // args.flights,
        most_rows=args.queue,
    )
    meter, size = PrometheusMetrics(), admission.size
    scheduler = EngineThread(size, admission.bounds, args.prefixes, args.flights, args.queue, meter)
    meter.watch(scheduler)
    try:
        yield Server(admission, scheduler, meter, args.max_body, key), scheduler
    finally:
        scheduler.close()


def _listening(host: str, port: int) -> socket.socket:
    """The socket, taken before models are loaded; nobody can connect yet."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise InputError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return listener


def _try(admission: Admission, scheduler: EngineThread) -> None:
    """Decodes a token with the default method: what is wrong shows now, and it is compiled.

    Raises:
      OptionError: it failed.
    """
    said: queue.Queue = queue.Queue()
    token = next(iter(admission.target.eos_ids), 0)
    body = CompletionBody(prompt=[token], max_tokens=2)
    scheduler.submit(admission.work(body, lambda number, piece: said.put(piece)))
    while True:
        piece = said.get()
        if isinstance(piece, Exception):
            raise OptionError(f"method {admission.method} failed: {piece}")
        if piece.row is not None:
            return


def _answer(app, listener: socket.socket, drain: int, key: str | None) -> None:
    """Answers requests until a signal; then those that came before it."""
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
        say("infer.serve", f"{host} is open to others, and there is no key: see --api-key")
    shown = f"[{host}]" if ":" in host else host
    # uvicorn raises the signal again when it has ended; it has done its work by then.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    listener.listen(BACKLOG)
    try:
        say("infer.serve", f"http://{shown}:{port}")
        asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))
    finally:
        signal.signal(signal.SIGTERM, before)
