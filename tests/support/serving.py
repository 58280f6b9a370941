"""A server of ``infer.serve`` in this process, on a port of its own, and bare HTTP to it."""

import contextlib
import http.client
import json
import socket
import threading
import time
from dataclasses import dataclass

import uvicorn

import specjax as sj
from infer.serve.admission import Admission
from infer.serve.app import Server
from infer.serve.commands import parser
from infer.serve.engine_thread import EngineThread
from infer.serve.server import assembled

TIMEOUT = 300  # seconds: compilation is slow on a machine with other work


@dataclass(frozen=True)
class Running:
    """A server that answers requests, and its parts."""

    target: sj.LM
    draft: sj.LM
    engine: EngineThread
    admission: Admission
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method, path, body=None, **headers):
        """(status, object, headers) of one request; a body is bytes, or else sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        with contextlib.closing(connection):
            given = {"Content-Type": "application/json"} if body is not None else {}
            given |= {name.replace("_", "-"): value for name, value in headers.items()}
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, given)
            answer = connection.getresponse()
            text = answer.read()
            kind = answer.headers.get("content-type", "")
            return answer.status, json.loads(text) if "json" in kind else text, answer.headers

    def complete(self, **body):
        """The object of a completion that must succeed."""
        status, answer, _ = self.ask("POST", "/v1/completions", body)
        assert status == 200, answer
        return answer


def until(holds, seconds=30.0):
    """Waits until ``holds()`` is true."""
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.01)


@contextlib.contextmanager
def answering(server: Server):
    """The port at which a server answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(server.app(), http="h11", lifespan="off", log_level="critical")
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        until(lambda: running.started)
        try:
            yield listener.getsockname()[1]
        finally:
            running.should_exit = True
            thread.join()


@contextlib.contextmanager
def serving(target: sj.LM, draft: sj.LM, *arguments: str, key=None):
    """A server of these models; ``arguments`` are the command line's."""
    args = parser().parse_args(["--name", "tiny", *arguments])
    with (
        assembled(args, target, draft, key) as (server, engine),
        answering(server) as port,
    ):
        yield Running(target, draft, engine, server.admission, port)
