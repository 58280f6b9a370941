"""Starts the server: loads the models, starts the engine's thread, answers HTTP until a signal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import gc
import ipaddress
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import uvicorn
from fastapi import FastAPI

from infer.loading import chosen_sampling, device_memory, load_models, use_compilation_cache
from infer.serve.admission import Admission
from infer.serve.app import Server
from infer.serve.commands import KEY_VARIABLE
from infer.serve.connections import Connection, connections_within
from infer.serve.engine_thread import EngineThread
from infer.serve.follower import Follower
from infer.serve.hosts import END, Followers, LeaderConnection, lead
from infer.serve.log import limit_log, log_format
from infer.serve.memory import limited_memory
from infer.serve.metrics import PrometheusMetrics
from infer.serve.schemas import CompletionBody
from infer.serve.tools.families import family_name
from infer.serve.variants import Submission
from specjax._util import processes
from specjax._util.errors import InputError, OptionError
from specjax._util.program import say
from specjax._util.waiting import waiting
from specjax.core.sampling import Sampling
from specjax.lm import LM, model_digest
from specjax.registry import Context, method
from specjax.runtime.generate import num_slots

BATCH_MEMORY = 0.5  # share of the device's memory for the rows of all methods
# Connections that the system keeps until they are accepted, and that are accepted at a time.
BACKLOG = 128
SWITCH_SECONDS = 0.0005
COMPUTING_NICE = 5  # what JAX's threads are nicer by than those that answer
GARBAGE = (10_000, 20, 50)  # new objects, and collections of each age until one of the next


# Arguments that only process 0 uses; in all others the processes of a model must agree.
OF_ONE_PROCESS = (
    *("distributed", "meeting_timeout", "host", "port", "allowed_host", "proxy_headers"),
    *("api_key", "log_format", "max_connections", "max_body", "drain", "queue"),
)
OTHERS_DIED = "start all of them again"


def serve(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or an interrupt; returns the exit code.

    Raises:
      SpecjaxError: an argument is wrong, or the default method fails.
    """
    keys = args.api_key or list(filter(None, [os.environ.get(KEY_VARIABLE, "").strip()]))
    spec = method(args.method) if args.method else None
    if spec:  # report wrong options before models load, which can take minutes
        spec.resolve(dict(args.set))
    _allowed_methods(args.methods)
    limit_log()
    with log_format(args.log_format), limited_memory(), contextlib.ExitStack() as stack:
        if args.distributed:
            _join(args)

        def listen() -> socket.socket | None:
            if not processes.is_main_process():
                return None
            return stack.enter_context(_listening_socket(args.host, args.port))

        listener = processes.raise_everywhere(listen)
        _start_computing_threads()
        use_compilation_cache()
        want_draft = spec is None or spec.needs_draft
        target, draft = processes.raise_everywhere(lambda: load_models(args, want_draft, args.mesh))
        followers = None
        if args.distributed:
            _check_agreement(args, target, draft)
            host = processes.first_host(str(args.distributed))
            if listener is None:
                return _follow(args, target, draft, LeaderConnection(host))
            followers = lead(jax.process_count(), host)
        with assembled(args, target, draft, keys, followers) as (server, engine):
            with waiting("decoding a first text"):
                first = _decode_one(server.admission, engine)
            if args.warm_up:
                say("infer.serve", "compiling for all lengths")
                with waiting("compiling for all lengths"):
                    engine.warm_up(first)
            else:
                engine.compile_ahead(first)
            _shorten_pauses()
            _answer_requests(server.app(), listener, args, bool(keys))
    return 0


def _join(args: argparse.Namespace) -> None:
    """Joins the processes of a model that spans several.

    SIGTERM stays with this program: it ends a server that answers nothing yet.
    """
    jax.config.update("jax_enable_preemption_service", False)
    job = f"--name {args.name or _shown_name(args.target)}"
    place = str(args.distributed)
    processes.join(place, "infer.serve", OTHERS_DIED, job, args.meeting_timeout)


def _start_computing_threads() -> None:
    """Starts JAX's own threads, which compute, with a lower priority than Python's.

    Where all cores compute, the thread that has Python's lock would wait for one, and every answer
    with it. On Linux a thread begins with the priority of the one that starts it.
    """

    def start() -> None:
        if sys.platform == "linux":
            number = threading.get_native_id()
            nice = os.getpriority(os.PRIO_PROCESS, number) + COMPUTING_NICE
            os.setpriority(os.PRIO_PROCESS, number, min(nice, 19))
        jax.local_devices()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(start).result()


def _check_agreement(args: argparse.Namespace, target: LM, draft: LM | None) -> None:
    """Checks that all processes will run the same programs on the same weights.

    Raises:
      InputError: they would not.
    """
    given = {name: value for name, value in vars(args).items() if name not in OF_ONE_PROCESS}
    sources = {"target": args.target} | ({} if draft is None else {"draft": draft.source})
    processes.check_agreement(
        models={name: model_digest(source, args.base) for name, source in sources.items()},
        tokenizer=target.tokenizer.fingerprint,
        arguments={name: str(value) for name, value in given.items()},
        jax=jax.__version__,
    )


def _follow(
    args: argparse.Namespace, target: LM, draft: LM | None, leader: LeaderConnection
) -> int:
    """Does what process 0 says, until it ends; returns the exit code."""
    admission = follower_admission(args, target, draft)
    leader.pass_signals_on()
    say("infer.serve", f"process {jax.process_index()} follows process 0, which answers requests")
    Follower(admission, leader.receive).run()
    return 0


@contextlib.contextmanager
def assembled(
    args: argparse.Namespace,
    target: LM,
    draft: LM | None,
    keys: Sequence[str] = (),
    followers: Followers | None = None,
) -> Iterator[tuple[Server, EngineThread]]:
    """The server of these models, and its engine, which runs until the block ends.

    ``followers`` are the other processes of the models, if there are any.
    """
    admission = _admission(args, target, draft)
    metrics = PrometheusMetrics(admission.name)
    followers = followers or Followers()
    engine = EngineThread(
        size=admission.size,
        bounds=admission.bounds,
        max_methods=args.max_methods,
        max_waiting=args.queue,
        metrics=metrics,
        # Programs that two threads start on several devices could wait for each other.
        workers=args.max_methods + 2 if target.mesh is None else 1,
        followers=followers,
    )
    metrics.watch(engine, admission)
    try:
        yield Server(admission, engine, metrics, args.max_body, keys, args.allowed_host), engine
    finally:
        engine.close()
        followers.tell(END)


def _admission(args: argparse.Namespace, target: LM, draft: LM | None) -> Admission:
    """What the models and the arguments let requests ask for."""
    spec = method(args.method or ("speculative" if draft else "autoregressive"))
    options = spec.resolve(dict(args.set))
    sampling = {"temperature": 1.0}  # OpenAI's default
    context = Context(target, draft)
    sampling |= chosen_sampling("infer.serve", args, context, spec, options, {}, sampling)
    return Admission(
        target=target,
        draft=draft,
        name=args.name or _shown_name(args.target),
        method=spec.name,
        defaults=dict(args.set),
        sampling=Sampling(**sampling),
        size=num_slots(target, args.batch_size, args.batch_size),
        max_prompt=args.max_prompt,
        max_output=min(args.max_output, target.config.max_position - 1),
        memory=int(device_memory() * BATCH_MEMORY) // args.max_methods,
        prefixes=args.prefixes,
        max_rows=max(1, args.queue // 2),  # what one client may have waiting
        methods=_allowed_methods(args.methods),
        tool_family=args.tool_call_parser or family_name(target.tokenizer.tool_template),
    )


def follower_admission(args: argparse.Namespace, target: LM, draft: LM | None) -> Admission:
    """As process 0's, without limits: process 0 has checked each request against its own."""
    admission = _admission(args, target, draft)
    return dataclasses.replace(admission, memory=sys.maxsize, max_rows=sys.maxsize)


def _allowed_methods(names: str | None) -> list[str] | None:
    """The methods of ``--methods``; None: all of them.

    Raises:
      OptionError: there is no such method.
    """
    if names is None:
        return None
    if names == "none":
        return []
    return [method(name.strip()).name for name in names.split(",")]


def _shown_name(target: str) -> str:
    """The model's name for clients: of a directory its last part, because paths are private."""
    if os.path.isdir(target):
        return os.path.basename(os.path.abspath(target))
    return target


def _listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on the address.

    It listens before models load, so that a port in use is reported at once: two sockets can be
    bound to one port, but only one listens. Clients that connect early wait for their answer.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of a name is too long
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--host {host} --port {port}: {reason}") from None
    return listener


def _decode_one(admission: Admission, engine: EngineThread) -> Submission:
    """Decodes two tokens with the default method, to compile it and to see that it works.

    Returns:
      What was asked for.

    Raises:
      OptionError: decoding failed.
    """
    pieces: queue.Queue = queue.Queue()
    token = next(iter(admission.target.eos_ids), 0)
    body = CompletionBody(prompt=[token], max_tokens=min(2, admission.max_output))
    submission = admission.make_submission(body, lambda number, piece: pieces.put(piece))
    engine.submit(submission)
    while True:
        piece = pieces.get()
        if isinstance(piece, Exception):
            raise OptionError(f"method {admission.method} failed: {piece}")
        if piece.row is not None:
            return submission


def _shorten_pauses() -> None:
    """Lets the event loop run soon, although other threads trace programs.

    Python's threads take turns, by default of 5 ms. And each collection of garbage stops them all
    for as long as there are objects to look at. So those of now are left out from here on, and
    collections are rarer.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE)


def _answer_requests(
    app: FastAPI, listener: socket.socket, args: argparse.Namespace, has_key: bool
) -> None:
    """Answers requests until a signal, then finishes open ones for up to ``--drain`` seconds."""
    host, port = listener.getsockname()[:2]
    if not has_key and not ipaddress.ip_address(host).is_loopback:
        say("infer.serve", f"other machines can reach {host}, and there is no key: see --api-key")
    url_host = f"[{host}]" if ":" in host else host
    # uvicorn raises the signal again after it has shut down. That must not kill the process,
    # which would then not exit with 0.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        say("infer.serve", f"http://{url_host}:{port}")
        config = http_config(app, args.max_connections, args.drain, args.proxy_headers)
        asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))
    finally:
        signal.signal(signal.SIGTERM, before)


def http_config(
    app: FastAPI, max_connections: int, drain: int, proxy_headers: bool
) -> uvicorn.Config:
    """How uvicorn runs the application.

    ``proxy_headers``: a client of 127.0.0.1 is a proxy, which names the real one. Otherwise any
    local client could name another address with each request, and have all clients' shares.
    """
    most = connections_within(max_connections)
    return uvicorn.Config(
        app,
        http=functools.partial(Connection, max_connections=most),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=proxy_headers,
        forwarded_allow_ips="127.0.0.1",
        backlog=BACKLOG,
        timeout_graceful_shutdown=drain,
    )
