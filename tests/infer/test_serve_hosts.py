"""A server whose model spans processes: process 0 decides, and the others run the same programs."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

import specjax as sj
from infer.serve import commands
from infer.serve.follower import Follower
from infer.serve.hosts import END, SIZE, Followers
from infer.serve.schemas import ChatBody, CompletionBody
from infer.serve.server import assembled, follower_admission
from support.pace import slowdown
from support.serving import TIMEOUT, served_models, until

TEXT = "import jax\n\n\ndef step("
LIMITS = ["--batch-size", "2", "--max-prompt", "200", "--max-output", "100", "--name", "tiny"]
BODIES = (
    CompletionBody(prompt=TEXT, max_tokens=9, temperature=0.8, n=3),
    CompletionBody(prompt=[TEXT, "def f("], max_tokens=12, seed=3, logprobs=2, echo=True),
    ChatBody.model_validate(
        {"messages": [{"role": "user", "content": "a ü"}], "max_tokens": 7, "top_p": 0.5}
    ),
    ChatBody.model_validate(
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
                {"role": "user", "content": "b"},
            ],
            "max_tokens": 3,
        }
    ),
    CompletionBody(prompt="class A:", max_tokens=20, method="specinfer", temperature=1.0),
)


@pytest.fixture(scope="module")
def models(tiny_pair_dirs, tmp_path_factory):
    return served_models(tiny_pair_dirs, tmp_path_factory.mktemp("served") / "target")


def arguments(*more):
    return commands.parser().parse_args([*LIMITS, *more])


class Recording(Follower):
    """A follower that keeps the tokens of each request."""

    def __init__(self, *args):
        super().__init__(*args)
        self.tokens = {}

    def _poll(self, **about):
        pieces = super()._poll(**about)
        for piece in pieces:
            self.tokens.setdefault(piece.index, []).extend(piece.tokens.tolist())
        return pieces


def messages(data):
    """The messages that were sent, in their order."""
    while data:
        (size,) = SIZE.unpack(data[: SIZE.size])
        yield json.loads(data[SIZE.size : SIZE.size + size])
        data = data[SIZE.size + size :]


def test_what_process_0_sends_gives_its_tokens_elsewhere(models):
    sent = bytearray()
    ours, ends = {}, {}
    args = arguments()
    with assembled(args, *models, (), Followers([sent.extend])) as (server, engine):
        first_id = 0
        for body in BODIES:

            def keep(number, piece, first_id=first_id):
                ours.setdefault(first_id + number, []).extend(piece.tokens.tolist())
                if piece.row is not None:
                    ends[first_id + number] = True

            submission = server.admission.make_submission(body, keep)
            engine.submit(submission)
            first_id += submission.size
        left = server.admission.make_submission(BODIES[0], lambda *_: None)
        engine.submit(left)
        engine.cancel(left)
        until(lambda: len(ends) == first_id, 300)
        until(lambda: not engine.num_running and not engine.num_waiting)

    received = list(messages(bytes(sent)))
    assert received[-1]["what"] == END
    assert {"submit", "poll", "request", "score"} <= {message["what"] for message in received}
    stream = iter(received)
    follower = Recording(follower_admission(args, *models), lambda: next(stream))
    follower.run()
    assert next(stream, None) is None
    for request_id, tokens in ours.items():
        assert follower.tokens[request_id] == tokens
    assert not follower._requests, "a canceled request is not kept"


def test_processes_that_do_not_share_one_model_are_refused(capsys):
    for given in (["--mesh", "data=2"], ["--mesh", "model=3"], []):
        with pytest.raises(SystemExit) as ended:
            commands.main([*given, "--distributed", "localhost:1,2,0"])
        (line,) = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and "give --mesh model=N with a multiple of COUNT" in line


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def begin(target, meeting, http, index, *more):
    """One of two processes, with two simulated devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    command = [sys.executable, "-m", "infer.serve", "--target", target, "--mesh", "model=4"]
    command += ["--distributed", f"localhost:{meeting},2,{index}", "--port", str(http), *LIMITS]
    return subprocess.Popen(
        [*command, *more],
        env=os.environ | {"XLA_FLAGS": flags},
        stderr=subprocess.PIPE,
        text=True,
    )


def ask(port, **body):
    """The object of a completion."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        return json.load(answer)


def start_both(target, *more):
    """Both processes, once the first one answers, and its port."""
    meeting, http = free_port(), free_port()
    both = [begin(target, meeting, http, index, *more) for index in range(2)]
    for line in both[0].stderr:
        if f"http://127.0.0.1:{http}" in line:
            return both, http
    pytest.fail(both[1].communicate()[1])


@pytest.mark.slow
def test_a_model_that_spans_two_processes_is_served(tiny_pair_dirs):
    """A signal to the second process ends both; so does its death, with one line and code 1."""
    target = tiny_pair_dirs[0]
    both, port = start_both(target)
    body = {"prompt": TEXT, "max_tokens": 10, "temperature": 0.8, "n": 2, "seed": 5}
    texts = [choice["text"] for choice in ask(port, **body)["choices"]]
    model = sj.load(target)
    sampling = sj.Sampling(0.8)
    out = sj.generate(model, [TEXT], sampling=sampling, seed=5, num_samples=2, max_new_tokens=10)
    assert texts == out.text
    both[1].send_signal(signal.SIGTERM)
    asked = time.monotonic()
    for process in both:
        err = process.communicate(timeout=TIMEOUT)[1]
        assert process.returncode == 0 and "Traceback" not in err, err
    assert time.monotonic() - asked < 30 * slowdown()

    both, port = start_both(target)
    both[1].kill()
    died = time.monotonic()
    err = both[0].communicate(timeout=TIMEOUT)[1]
    assert both[0].returncode == 1 and "process 1 of 2 has died; start all of them again" in err
    assert time.monotonic() - died < 30 * slowdown()
    both[1].communicate()


@pytest.mark.slow
@pytest.mark.sweep
def test_processes_with_other_models_end_with_one_line(tiny_pair_dirs, tmp_path):
    meeting, http = free_port(), free_port()
    both = [begin(tiny_pair_dirs[index], meeting, http, index) for index in range(2)]
    for process in both:
        err = process.communicate(timeout=TIMEOUT)[1]
        assert process.returncode == 2 and "processes disagree on" in err, err
        assert "Traceback" not in err
