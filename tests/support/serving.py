"""A server of ``infer.serve`` in this process, on a port of its own, and bare HTTP to it."""

import contextlib
import http.client
import json
import shutil
import socket
import threading
import time
from dataclasses import dataclass, replace

import jax
import openai
import uvicorn

import specjax as sj
from infer.serve.admission import Admission
from infer.serve.app import Server
from infer.serve.commands import parser
from infer.serve.engine_thread import EngineThread
from infer.serve.server import assembled, http_config

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if loud %}LOUD{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TIMEOUT = 300  # seconds: compilation is slow on a machine with other work


def served_models(pair_dirs, home, template=TEMPLATE) -> tuple[sj.LM, sj.LM]:
    """A target with a chat template, and a draft that it sometimes accepts; ``home`` is new."""
    shutil.copytree(pair_dirs[0], home)
    (home / "chat_template.jinja").write_text(template)
    target, draft = sj.load(home), sj.load(pair_dirs[1])
    # Scaled up, its text varies, and its first layer as draft is sometimes accepted.
    params = target.params | {"layers": jax.tree.map(lambda x: 4 * x, target.params["layers"])}
    first = params | {"layers": {"0": params["layers"]["0"]}}
    return replace(target, params=params), replace(draft, params=first)


@dataclass(frozen=True)
class Running:
    """A server that answers requests, and its parts."""

    target: sj.LM
    draft: sj.LM | None
    engine: EngineThread
    admission: Admission
    port: int

    def send(self, data: bytes, address="127.0.0.1", seconds=TIMEOUT) -> bytes:
        """Everything that comes back for these bytes, sent from a loopback address."""
        place = ("127.0.0.1", self.port)
        with socket.create_connection(place, seconds, (address, 0)) as connection:
            connection.sendall(data)
            return b"".join(iter(lambda: connection.recv(2**16), b""))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method, path, body=None, address="127.0.0.1", **headers):
        """(status, object, headers) of one request; a body is bytes, or else sent as JSON.

        ``address`` is the client's own, on the loopback network.
        """
        source = (address, 0)
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=TIMEOUT, source_address=source
        )
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


def until(holds, seconds=TIMEOUT):
    """Waits until ``holds()`` is true."""
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.01)


@contextlib.contextmanager
def answering(server: Server, max_connections: int = 1024, proxy_headers: bool = False):
    """The port at which a server answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = http_config(server.app(), max_connections, 300, proxy_headers)
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
def serving(target: sj.LM, draft: sj.LM | None, *arguments: str, keys=()):
    """A server of these models; ``arguments`` are the command line's."""
    args = parser().parse_args(["--name", "tiny", *arguments])
    with (
        assembled(args, target, draft, keys) as (server, engine),
        answering(server, args.max_connections, args.proxy_headers) as port,
    ):
        yield Running(target, draft, engine, server.admission, port)


def openai_client(server: Running) -> openai.OpenAI:
    """OpenAI's client of a running server; it does not try again."""
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT
    )
