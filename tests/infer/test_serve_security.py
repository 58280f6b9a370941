"""``python -m infer.serve``: who may reach it, and what connections may cost."""

import asyncio
import contextlib
import json
import logging
import re
import resource
import socket
import struct
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tokenizers

from infer.serve import bodies, connections
from infer.serve import server as server_module
from infer.serve.app import _private_paths
from infer.serve.bodies import Bodies
from infer.serve.commands import main
from infer.serve.log import LOG, RECORDS, Limit, log_format
from infer.serve.refusals import Refusal, public
from infer.serve.server import BACKLOG, _listening_socket, _shown_name, http_config
from specjax._util.errors import InputError
from specjax.text.tokenizer import Tokenizer
from support.hostile import BACKTRACKING
from support.pace import slowdown
from support.serving import TIMEOUT, served_models, serving, until

HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LIMITS = ["--batch-size", "2", "--max-prompt", "600", "--max-output", "64"]


@pytest.fixture(scope="module")
def models(tiny_pair_dirs, tmp_path_factory):
    return served_models(tiny_pair_dirs, tmp_path_factory.mktemp("served") / "target")


@pytest.fixture(scope="module")
def server(models):
    with serving(*models, *LIMITS, "--allowed-host", "GPU1.example") as running:
        yield running


# --- hosts and origins -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host, status",
    [
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("127.0.0.1:80:80", 403),
        ("a@localhost/", 403),
        ("sub.gpu1.example", 403),
        ("localhost", 200),
        ("LocalHost:8000", 200),
        ("localhost.", 200),
        ("127.0.0.1", 200),
        ("192.168.1.5:8000", 200),
        ("[::1]:8000", 200),
        ("gpu1.example:8000", 200),
    ],
)
def test_a_name_that_leads_here_is_no_permission(server, host, status):
    """A page of another site can make its own name resolve to this machine."""
    for path in ("/v1/models", "/health", "/", "/nothing"):
        got, answer, _ = server.ask("GET", path, Host=host)
        assert got == (404 if path == "/nothing" and status == 200 else status), path
        if status == 403:
            assert answer["error"]["code"] == "host_not_allowed"
            assert "--allowed-host" in answer["error"]["message"]


@pytest.mark.parametrize(
    "origin, status",
    [
        ("http://evil.example", 403),
        ("https://evil.example:8000", 403),
        ("null", 403),
        ("http://localhost:3000", 403),
        ("http://localhost", 403),
        ("file://", 403),
        ("http://[", 403),
        ("http://localhost:8000", 200),
        ("https://gpu1.example", 200),
    ],
)
def test_pages_of_other_sites_are_refused(server, origin, status):
    headers = {"Host": "localhost:8000", "Origin": origin}
    assert server.ask("GET", "/v1/models", **headers)[0] == status
    got = server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}, **headers)[0]
    assert got == status


def test_a_request_without_host_has_no_foreign_name(server):
    assert server.send(b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_with_a_key_any_name_may_lead_here(models):
    with serving(*models, *LIMITS, keys=["one", "two"]) as server:
        for given in ("Bearer one", "bearer two", "BEARER  two "):
            headers = {"Authorization": given, "Host": "evil.example"}
            assert server.ask("GET", "/v1/models", **headers)[0] == 200
        for given in ("one", "Basic one", "Bearer", "Bearer three", "Bearer one two"):
            status, _, headers = server.ask("GET", "/v1/models", Authorization=given)
            assert status == 401 and headers["www-authenticate"] == "Bearer"
        foreign = {"Authorization": "Bearer one", "Origin": "http://evil.example"}
        assert server.ask("GET", "/v1/models", **foreign)[0] == 403


# --- what answers show -------------------------------------------------------------------------


def test_no_redirect_repeats_the_host(server):
    for path in ("/v1/models/", "/health/", "//evil.example"):
        status, _, headers = server.ask("GET", path)
        assert status == 404 and "location" not in headers


def test_head_and_allow(server):
    for path in ("/", "/health", "/v1/models", "/metrics", "/version", "/openapi.json"):
        got = server.send(f"HEAD {path} HTTP/1.0\r\n\r\n".encode())
        head, _, body = got.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ") and not body
        assert int(head.lower().partition(b"content-length: ")[2].split()[0]) > 0
    status, _, headers = server.ask("GET", "/v1/completions")
    assert status == 405 and headers["allow"] == "POST"


def test_answers_have_no_local_paths(tiny_pair_dirs, tmp_path):
    broken = "{{ raise_exception('no') }}"
    target, draft = served_models(tiny_pair_dirs, tmp_path / "target", broken)
    assert str(tmp_path) in target.source
    with serving(target, draft, *LIMITS) as server:
        body = {"messages": [{"role": "user", "content": "a"}]}
        status, failed, _ = server.ask("POST", "/v1/chat/completions", body)
        assert status == 400 and "its chat template failed: no" in failed["error"]["message"]
        models = server.ask("GET", "/v1/models")[1]
        for answer in (failed, models):
            assert str(tmp_path.parent) not in json.dumps(answer)
        assert models["data"][0]["draft"]
    assert _shown_name(str(tmp_path / "target")) == "target"
    assert _shown_name("demo") == "demo"


def test_no_form_of_a_model_s_name_shows_its_directory(tmp_path, monkeypatch):
    """What was read is not always what was given: a home, a hub's id, or a name with a slash."""
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "0a1b"
    for directory in (tmp_path / "target", snapshot):
        directory.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))

    def shown(source, read):
        tokenizer = SimpleNamespace(source=str(read))
        model = SimpleNamespace(source=source, tokenizer=tokenizer)
        private = _private_paths(SimpleNamespace(target=model, draft=None))
        return public(f"target {source}, a/b; {read}: its chat template failed", private)

    failed = "its chat template failed"
    target = tmp_path / "target"
    assert shown("~/target", target) == f"target target, a/b; target: {failed}"
    assert shown(f"{target}/", target) == f"target target/, a/b; target: {failed}"
    assert shown("some/model", snapshot) == f"target some/model, a/b; some/model: {failed}"
    assert shown("/model", "/model") == f"target /model, a/b; /model: {failed}"


# --- connections -------------------------------------------------------------------------------


def test_headers_that_do_not_come(server, monkeypatch):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    began = time.monotonic()
    assert server.send(HALF).startswith(b"HTTP/1.1 408 ")
    assert server.send(b"").startswith(b"HTTP/1.1 408 ")
    # The next request of a connection has the same time.
    with socket.create_connection(("127.0.0.1", server.port), 20) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += slow.recv(2**16)
        slow.sendall(HALF)
        assert slow.recv(2**16).startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - began < 8 * slowdown()


def test_headers_that_come_one_by_one(server, monkeypatch):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", server.port), 20) as slow:
        slow.sendall(HALF)
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < TIMEOUT:
                slow.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < 3 * slowdown()


def test_half_sent_requests_keep_nobody_out(models):
    limit = ["--max-connections", "20"]
    with serving(*models, *LIMITS, *limit) as server, contextlib.ExitStack() as stack:
        for i in range(100):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
            slow.sendall(HALF if i % 2 else HALF.replace(b"GET", b"POST"))
        worst = 0.0
        for _ in range(10):
            began = time.monotonic()
            assert server.ask("GET", "/health")[0] == 200
            worst = max(worst, time.monotonic() - began)
        assert worst < 2 * slowdown()


def test_connections_that_decode_are_not_closed_for_others(models):
    """If all connections wait for an answer, the next client is told so."""
    limit = ["--max-connections", "2"]
    with serving(*models, *LIMITS, *limit) as server, contextlib.ExitStack() as stack:
        data = json.dumps({"prompt": "a", "max_tokens": 64, "n": 2, "stream": True}).encode()
        open_ones = []
        for _ in range(2):
            place = ("127.0.0.1", server.port)
            one = stack.enter_context(socket.create_connection(place, TIMEOUT))
            one.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(data) + data)
            open_ones.append(one)
        until(lambda: len(server.engine._owners) == 4)
        assert server.send(b"").startswith(b"HTTP/1.1 503 ")
        for one in open_ones:
            text = b""
            while b"[DONE]" not in text:
                text += one.recv(2**16)


def test_what_is_no_http(server, caplog):
    for garbage in (b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"A" * 10**5):
        got = server.send(garbage)
        assert got.startswith(b"HTTP/1.1 400 ") and b'{"error": {"message"' in got
    assert not caplog.records


def chunked(data: bytes, size: int) -> bytes:
    """A completion's request whose body comes in chunks of ``size`` bytes."""
    head = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def test_bodies_in_tiny_chunks(server):
    small = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    assert server.send(chunked(small, 1)).startswith(b"HTTP/1.1 200 ")
    large = json.dumps({"prompt": "a " * 200, "max_tokens": 1}).encode()
    assert server.send(chunked(large, 100)).startswith(b"HTTP/1.1 200 ")
    began = time.process_time()
    assert b"too small" in server.send(chunked(b'{"prompt": "' + b"a" * 300_000, 1))
    assert server.ask("GET", "/health")[0] == 200
    assert time.process_time() - began < slowdown()


def test_large_bodies_count_until_they_are_parsed(monkeypatch):
    monkeypatch.setattr(bodies, "MAX_BODIES", 1)

    async def stream():
        yield b"a" * 90_000

    async def use():
        headers = {"content-type": "application/json"}
        request = SimpleNamespace(headers=headers, stream=stream)
        held = Bodies(100_000)
        async with held.read(request) as data:
            assert len(data) == 90_000
            with pytest.raises(Refusal, match="too many large bodies"):
                await held.read(request).__aenter__()
        async with held.read(request):
            pass

    asyncio.run(use())


def test_an_answer_that_nobody_reads(server, monkeypatch):
    """The connection is dropped, and its rows with it."""
    monkeypatch.setattr(connections, "READ_SECONDS", 0.3)
    text = "a " * 200
    body = {"prompt": [text] * 40, "max_tokens": 1, "echo": True, "logprobs": 5}
    data = json.dumps(body).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(TIMEOUT)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        until(lambda: not server.engine._owners and not server.engine.num_waiting)
    assert server.ask("GET", "/health")[0] == 200


def test_a_tokenizer_whose_pattern_backtracks_refuses_the_text(models, capfd):
    """Rust panics there; the request is refused, and the next one is answered."""
    target, draft = models
    definition = json.loads(target.tokenizer.to_json()) | {"pre_tokenizer": BACKTRACKING}
    backend = tokenizers.Tokenizer.from_str(json.dumps(definition))
    with serving(replace(target, tokenizer=Tokenizer(backend)), draft, *LIMITS) as server:
        body = {"prompt": "a" * 40 + "b", "max_tokens": 1}
        status, answer, _ = server.ask("POST", "/v1/completions", body)
        assert status == 400 and "cannot encode a text" in answer["error"]["message"]
        assert server.complete(prompt="b", max_tokens=1)["choices"]
    assert "panicked" not in capfd.readouterr().err


# --- the process -------------------------------------------------------------------------------


def test_the_log_is_bounded(caplog):
    logger = logging.getLogger("test of the limit")
    logger.addFilter(Limit())
    for i in range(1000):
        logger.error("failure %d", i)
    assert len(caplog.records) == RECORDS
    assert "no more messages for up to 60 s" in caplog.records[-1].getMessage()


def test_a_server_limits_its_log_before_it_loads_a_model(monkeypatch, capsys):
    called = []
    monkeypatch.setattr(server_module, "limit_log", lambda: called.append("limit"))
    assert main(["--target", "no/such/model", "--port", "0"]) == 2
    assert called == ["limit"] and "no/such/model" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO of a listener is Linux's")
def test_few_connections_wait_to_be_accepted():
    """A flood of them fills the kernel's queue, and the others are not kept."""
    with _listening_socket("127.0.0.1", 0) as listener:
        info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    (longest,) = struct.unpack_from("I", info, 28)  # tcpi_sacked: of a listener its backlog
    assert longest == BACKLOG == http_config(None, 1024, 1, False).backlog


def test_two_servers_on_one_port():
    """The second says so in one line, though the first one still loads its models."""
    with _listening_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(InputError, match=f"--port {port}: Address already in use"):
            _listening_socket("127.0.0.1", port)


def test_open_files_bound_connections():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        assert connections.connections_within(300) == 300
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300 + connections.OTHER_FILES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_log_as_json_has_a_line_for_each_completion_and_answer(server, capsys):
    """Whatever else is printed is the message of a line. No line has the prompt."""
    body = {"prompt": "a secret of the client", "max_tokens": 3, "temperature": 0}
    with log_format("json"):
        server.ask("POST", "/v1/completions", body)
        server.ask("GET", "/nowhere")
        print("a warning of a library", file=sys.stderr)
        LOG.error("method failed", exc_info=ValueError("why"))
    server.ask("POST", "/v1/completions", body)  # as text, nothing is written
    err = capsys.readouterr().err
    lines = [json.loads(line) for line in err.splitlines()]
    (completion,) = (line for line in lines if line["message"] == "completion")
    assert (completion["completion_tokens"], completion["finish_reason"]) == (3, "length")
    assert completion["seconds"] > 0
    answers = [line["status"] for line in lines if line["message"] == "answer"]
    assert answers[-2:] == [200, 404]  # before them maybe those of earlier tests
    warning, fault = lines[-2:]
    assert warning["message"] == "a warning of a library"
    assert fault["level"] == "error" and "ValueError: why" in fault["traceback"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}\.\d{3}Z", fault["time"])
    assert "secret" not in err
