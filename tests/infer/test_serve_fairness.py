"""``python -m infer.serve``: what one client may take, and what the others get meanwhile."""

import ast
import asyncio
import concurrent.futures
import gc
import re
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from infer.serve import app, engine_thread, programs
from infer.serve.app import client_at
from infer.serve.fairness import FairSemaphore, QueueFull, RoundRobinQueue, fits
from infer.serve.programs import (
    MAX_COMPILATIONS,
    MAX_COMPILED,
    MAX_NEW,
    Programs,
    TooManyNew,
)
from infer.serve.schemas import CompletionBody
from infer.serve.server import _allowed_methods
from infer.serve.variants import VariantQueue
from specjax._util.errors import OptionError
from specjax.core import loop
from specjax.runtime.scheduler import Scheduler
from specjax.runtime.warmup import warm_up_in_background
from specjax.text import chat
from specjax.text.tokenizer import Tokenizer
from support.pace import slowdown
from support.serving import TIMEOUT, served_models, serving, until

LIMITS = ["--batch-size", "2", "--max-prompt", "600", "--max-output", "400", "--queue", "40"]
ROOT = Path(__file__).parents[2]
A, B, C = (f"127.0.0.{i}" for i in (2, 3, 4))
LOOPS = """{% if loops %}{% for i in range(99999) %}{% for j in range(99999) %}
{% endfor %}{% endfor %}{% endif %}"""
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def models(tiny_pair_dirs, tmp_path_factory):
    template = LOOPS + "{{ messages[0].content }}"
    return served_models(tiny_pair_dirs, tmp_path_factory.mktemp("served") / "target", template)


@pytest.fixture(scope="module")
def server(models):
    with serving(*models, *LIMITS) as running:
        running.complete(prompt="a", max_tokens=1)
        yield running


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(32) as threads:
        yield threads


# --- shares and turns --------------------------------------------------------------------------


def test_something_is_always_left():
    taken = {}
    for client in range(8):
        taken[client] = 0
        while fits(1, taken[client], sum(taken.values()) - taken[client], 64):
            taken[client] += 1
    assert [taken[client] for client in range(6)] == [32, 16, 8, 4, 2, 1]
    assert fits(1, 0, 0, 1) and not fits(1, 1, 0, 1) and not fits(1, 0, 1, 1)


def test_clients_take_turns():
    queue = RoundRobinQueue()
    queue.extend("a", range(5))
    queue.extend("b", (10, 11))
    assert queue.drop(lambda item: item == 3) == 1 and queue.count("a") == 4
    order = [queue.pop()[1] for _ in range(3)]
    assert queue.pop(lambda client: client == "a") == ("a", 2)
    with pytest.raises(LookupError):
        queue.pop(lambda client: client == "c")
    assert order == [0, 10, 1] and [queue.pop()[1] for _ in range(len(queue))] == [11, 4]


def test_places_go_round():
    async def use():
        semaphore, order = FairSemaphore(2, max_waiting=8), []

        async def one(client, number):
            async with semaphore.place(client):
                order.append(f"{client}{number}")
                await asyncio.sleep(0.001)

        async def cancelled():
            task = asyncio.create_task(one("a", 9))
            await asyncio.sleep(0)
            task.cancel()

        many = [one("a", i) for i in range(4)] + [cancelled()] + [one("b", i) for i in range(3)]
        await asyncio.gather(*many)
        assert order[:4] == ["a0", "b0", "a1", "b1"] and sorted(order) == sorted(set(order))
        assert not semaphore._running and not len(semaphore._waiting)
        full = await asyncio.gather(*(one("a", i) for i in range(9)), return_exceptions=True)
        assert [type(error) for error in full if error] == [QueueFull] * 4

    asyncio.run(use())


def test_who_is_one_client():
    assert client_at("10.0.0.1") == "10.0.0.1" != client_at("10.0.0.2")
    assert client_at("::ffff:10.0.0.1") == "10.0.0.1"  # of a socket for both versions
    assert client_at("2001:db8::1") == client_at("2001:db8::ffff:1") != client_at("2001:db9::1")


@pytest.mark.parametrize(
    ("arguments", "address", "client"),
    [
        ([], "127.0.0.1", "127.0.0.1"),
        (["--proxy-headers"], "127.0.0.1", "10.0.0.9"),
        (["--proxy-headers"], A, A),
    ],
)
def test_only_a_proxy_that_is_asked_for_names_its_clients(
    models, monkeypatch, arguments, address, client
):
    seen = set()
    monkeypatch.setattr(app, "client_at", lambda address: seen.add(address) or address)
    with serving(*models, *LIMITS, *arguments) as server:
        headers = {"X_Forwarded_For": "10.0.0.9"}
        server.ask("POST", "/tokenize", {"prompt": "a"}, address, **headers)
    assert seen == {client}


# --- texts -------------------------------------------------------------------------------------


def test_long_texts_are_refused_before_they_are_tokenized(server, monkeypatch):
    def fail(self, text, add_special_tokens=True):
        raise AssertionError("tokenized")

    monkeypatch.setattr(Tokenizer, "encode", fail)
    text = "a " * 500_000
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ["a" * 30_000, text[:900_000]]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/tokenize", {"prompt": text}),
    ):
        status, answer, _ = server.ask("POST", path, body)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded", answer


def test_the_bound_refuses_no_text_that_fits(server):
    tokenizer = server.target.tokenizer
    longest = int(np.argmax([len(token) for token in tokenizer.token_bytes()]))
    text = tokenizer.decode([longest] * 600)
    assert len(text.encode()) > 600
    assert len(server.admission.text_ids(text, "prompt")) >= 600
    with pytest.raises(OptionError, match="bytes: at most 600 tokens"):
        server.admission.text_ids(text + text + " ", "prompt")


def test_threads_go_on_while_a_text_is_tokenized(server):
    tokenizer, text, gaps = server.target.tokenizer, "def f(x): return x\n" * 40_000, []
    thread = threading.Thread(target=tokenizer.encode, args=(text,))
    began = time.perf_counter()
    thread.start()
    while thread.is_alive():
        before = time.perf_counter()
        time.sleep(0.001)
        gaps.append(time.perf_counter() - before)
    assert max(gaps) < (time.perf_counter() - began) / 2 and len(gaps) > 20


def test_a_template_that_loops_keeps_nobody_waiting(server, pool, monkeypatch):
    """The looping client has at most half of the places, whatever it sends."""
    seconds = round(1.5 * slowdown(), 1)
    monkeypatch.setattr(chat, "MAX_SECONDS", seconds)
    server.ask("POST", "/v1/chat/completions", CHAT)  # compiled
    looping = CHAT | {"chat_template_kwargs": {"loops": True}}
    asks = [pool.submit(server.ask, "POST", "/v1/chat/completions", looping, A) for _ in range(6)]
    time.sleep(0.3)
    began = time.monotonic()
    for address in (B, C):
        assert server.ask("POST", "/v1/chat/completions", CHAT, address)[0] == 200
    assert server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}, A)[0] == 200
    assert time.monotonic() - began < 0.8 * seconds
    for ask in asks:
        status, answer, _ = ask.result()
        assert status == 400 and f"longer than {seconds:g} s" in answer["error"]["message"]


# --- rows --------------------------------------------------------------------------------------


@pytest.fixture
def slowly(monkeypatch):
    """Makes rounds as slow as a larger model's."""
    poll = VariantQueue.poll

    def slow(self, next_request):
        time.sleep(0.02)
        return poll(self, next_request)

    monkeypatch.setattr(VariantQueue, "poll", slow)


def test_many_rows_of_one_client_do_not_fill_the_queue(server, slowly, pool):
    big = {"prompt": "a", "max_tokens": 30, "n": 20, "temperature": 0}
    first = pool.submit(server.ask, "POST", "/v1/completions", big, A)
    until(lambda: server.engine.num_waiting >= 16)
    status, answer, _ = server.ask("POST", "/v1/completions", big, A)
    assert status == 429 and answer["error"]["code"] == "queue_full"
    small = {"prompt": "a", "max_tokens": 3}
    for _ in range(3):
        assert server.ask("POST", "/v1/completions", small, B)[0] == 200
    assert server.engine.num_waiting > 4, "they did not wait for all rows of the other client"
    assert first.result()[0] == 200


# --- methods -----------------------------------------------------------------------------------


class Compiling:
    """Polls of ``block`` last until ``end`` is called, as a compilation does, and then fail."""

    def __init__(self):
        self.most = 0  # polls at the same time
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._polled = set()

    def end(self):
        self._ends.set()

    def wait(self, variant):
        with self._lock:
            self._polled.add(variant.key)
            self.most = max(self.most, len(self._polled))
        self._ends.wait(TIMEOUT)
        with self._lock:
            self._polled.discard(variant.key)


@pytest.fixture
def compiling(monkeypatch):
    compiling = Compiling()
    poll = VariantQueue.poll

    def slow(self, next_request):
        if self.variant.name == "block":
            compiling.wait(self.variant)
            raise RuntimeError("enough for a test")
        return poll(self, next_request)

    monkeypatch.setattr(VariantQueue, "poll", slow)
    yield compiling
    compiling.end()


def test_a_new_method_compiles_aside(server, compiling, pool):
    new = {"prompt": "a", "max_tokens": 2, "method": "block", "options": {"gamma": 2}}
    ask = pool.submit(server.ask, "POST", "/v1/completions", new, A)
    until(lambda: compiling.most)
    for _ in range(3):
        assert server.complete(prompt="a", max_tokens=4)["choices"]
    assert not ask.done()
    compiling.end()
    assert ask.result()[0] == 500


def test_a_method_that_failed_leaves_nothing_in_memory(server, monkeypatch):
    """Without a collection of garbage, which a server has seldom."""
    schedulers = []

    def failing(self):
        schedulers.append(weakref.ref(self))
        raise RuntimeError("enough for a test")

    monkeypatch.setattr(Scheduler, "_read_results", failing)
    monkeypatch.setattr(engine_thread.LOG, "error", lambda *_, **__: None)  # pytest keeps it
    body = {"prompt": "a", "max_tokens": 4, "method": "autoregressive"}
    gc.disable()
    try:
        assert server.ask("POST", "/v1/completions", body)[0] == 500
        until(lambda: schedulers[0]() is None)
    finally:
        gc.enable()


class CompilingInBackground:
    """Compilations for other lengths and settings, which wait until ``end`` is set."""

    def __init__(self, fails=False):
        self.calls = 0
        self.end = threading.Event()
        self._fails = fails

    def __call__(self, *args, **named):
        self.calls += 1
        self.end.wait(TIMEOUT)
        if self._fails:
            raise RuntimeError("enough for a test")
        warm_up_in_background(*args, **named)


@pytest.mark.parametrize(("length", "fails"), [(40, True), (200, False), (300, True)])
def test_a_longer_prompt_compiles_aside(server, pool, monkeypatch, length, fails):
    """Other requests of its method go on. If that fails, it compiles where it runs.

    Another one of that length, whose options compile nothing new, waits for the same programs.
    """
    compiling = CompilingInBackground(fails)
    monkeypatch.setattr(engine_thread, "warm_up_in_background", compiling)
    long = {"prompt": [5] * length, "max_tokens": 2, "temperature": 0}
    ask = pool.submit(server.ask, "POST", "/v1/completions", long)
    until(lambda: compiling.calls)
    other = long | {"options": {"tau1": 0.5}}
    again = pool.submit(server.ask, "POST", "/v1/completions", other)
    for _ in range(3):
        assert server.complete(prompt="a", max_tokens=4)["choices"]
    assert not ask.done() and not again.done() and server.engine.num_waiting == 2
    compiling.end.set()
    texts = {one.result()[1]["choices"][0]["text"] for one in (ask, again)}
    texts.add(server.complete(**long)["choices"][0]["text"])
    assert len(texts) == 1 and compiling.calls == 1


OTHER_SETTINGS = {"frequency_penalty": 0.5, "top_n_sigma": 2}  # of every kind but grammars


@pytest.mark.parametrize(
    "settings",
    [
        {"presence_penalty": 0.5},
        {"min_p": 0.1, "temperature": 1},
        {"structured_outputs": {"regex": "[ab]{3}"}},
        {"bad_words": ["import"] * 20},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_a_batch_has_not_had_compile_aside(models, pool, monkeypatch, settings):
    """Other requests of its method go on, and afterwards nothing is left to compile."""
    compiling = CompilingInBackground()
    monkeypatch.setattr(engine_thread, "warm_up_in_background", compiling)
    with serving(*models, *LIMITS) as server:
        plain = {"prompt": "a", "max_tokens": 4}
        server.complete(**plain)
        submission = server.admission.make_submission(CompletionBody(**plain), print)
        programs = (loop.run_rounds, loop.fill_slots, loop.prefill_chunks, loop.begin_prefill)

        def sizes():
            """How often each program of the method has been traced."""
            made = [program.made.get(submission.variant.engine.method, {}) for program in programs]
            return [{key: program._cache_size() for key, program in of.items()} for of in made]

        ask = pool.submit(server.ask, "POST", "/v1/completions", plain | settings)
        until(lambda: compiling.calls)
        for _ in range(3):
            assert server.complete(**plain)["choices"]
        assert not ask.done() and server.engine.num_waiting == 1
        compiling.end.set()
        until(lambda: server.engine._compilation is None)
        compiled = sizes()
        assert ask.result()[0] == 200
        for body in (plain, plain | settings, plain):
            assert server.complete(**body)["choices"]
        assert sizes() == compiled
        assert compiling.calls == 1, "others join that batch as it is"

        compiled = []
        monkeypatch.setattr(
            engine_thread,
            "warm_up_in_background",
            lambda *args, **named: compiled.append(compiling(*args, **named) or sizes()),
        )
        both = plain | settings | OTHER_SETTINGS
        for _ in range(2):
            assert server.complete(**both)["choices"]
        assert sizes() == compiled[-1] and len(compiled) == 1


def test_clients_take_turns_with_what_compiles_in_the_background(models, pool, monkeypatch):
    """One that asks for many lengths does not keep another one waiting for all of them."""
    compiling = CompilingInBackground()
    compiled = []

    def note(*args, **named):
        compiled.append(len(args[3].tokens))
        compiling(*args, **named)

    monkeypatch.setattr(engine_thread, "warm_up_in_background", note)
    with serving(*models, *LIMITS) as server:
        server.complete(prompt="a", max_tokens=1)

        def ask(length, address):
            body = {"prompt": [5] * length, "max_tokens": 1}
            return pool.submit(server.ask, "POST", "/v1/completions", body, address)

        asks = []
        for length, address in ((200, A), (400, A), (560, A), (40, B)):
            asks.append(ask(length, address))
            until(lambda: server.engine.num_waiting == len(asks))
            until(lambda: compiling.calls)
        compiling.end.set()
        assert all(ask.result()[0] == 200 for ask in asks)
        assert sorted(compiled) == [40, 200, 400, 560]
        assert compiled.index(40) <= 2, "the other client's third length came first"


def test_a_batch_that_has_grown_compiles_nothing_for_short_prompts(
    models, slowly, pool, monkeypatch
):
    """The rounds of its cache positions have been compiled where it grew."""
    compiling = CompilingInBackground()
    compiling.end.set()
    monkeypatch.setattr(engine_thread, "warm_up_in_background", compiling)
    with serving(*models, *LIMITS) as server:
        short = {"prompt": [5] * 17, "max_tokens": 1}
        server.complete(**short)
        long = short | {"max_tokens": 300, "ignore_eos": True}
        row = pool.submit(server.complete, **long)
        (queue,) = server.engine._queues.values()
        until(lambda: queue.capacity > 128)
        assert server.complete(**short)["choices"] and not row.done()
        assert row.result()["choices"]
        assert compiling.calls == 1, "for the row that ignores EOS, and for none beside it"


def test_an_idle_batch_that_has_grown_takes_new_settings(models, monkeypatch):
    """It keeps its cache positions, so the programs for those compile, and once."""
    compiling = CompilingInBackground()
    compiling.end.set()
    monkeypatch.setattr(engine_thread, "warm_up_in_background", compiling)
    with serving(*models, *LIMITS) as server:
        server.complete(prompt="a", max_tokens=300, ignore_eos=True)
        calls = compiling.calls
        (queue,) = server.engine._queues.values()
        until(lambda: queue.scheduler.is_idle)
        assert queue.scheduler.capacity > 128
        for _ in range(2):
            assert server.complete(prompt="a", max_tokens=2, top_n_sigma=1)["choices"]
        assert compiling.calls == calls + 1


def test_a_request_waits_for_few_compilations(models, monkeypatch):
    """Others may change what its batch runs each time. Then it compiles where it runs."""
    calls = []
    monkeypatch.setattr(engine_thread, "warm_up_in_background", lambda *args, **_: calls.append(1))
    monkeypatch.setattr(Programs, "add_shape", lambda *args: None)
    with serving(*models, *LIMITS) as server:
        server.complete(prompt="a", max_tokens=1)
        assert server.complete(prompt="a", max_tokens=2, top_n_sigma=1)["choices"]
        assert len(calls) == MAX_COMPILATIONS
        (queue,) = server.engine._queues.values()
        assert not queue.compilations_of


def test_what_short_prompts_run_is_compiled_ahead(models, monkeypatch):
    """For each size of prefill chunk in the first cache positions, and only once."""
    lengths = []
    monkeypatch.setattr(
        engine_thread,
        "warm_up_in_background",
        lambda *args, **_: lengths.append(len(args[3].tokens)),
    )
    with serving(*models, *LIMITS) as server:
        server.complete(prompt=[5], max_tokens=1)
        body = CompletionBody(prompt=[5])
        submission = server.admission.make_submission(body, print)
        for _ in range(2):
            server.engine.compile_ahead(submission)
            until(lambda: len(lengths) >= 4 and not server.engine._ahead)
        positions = submission.variant.engine.method.round_positions
        assert lengths == [16, 32, 64, 128 - positions]


@pytest.mark.slow
def test_a_longer_prompt_waits_for_nothing_after_a_warmup(models, monkeypatch):
    monkeypatch.setattr(
        engine_thread, "warm_up_in_background", lambda *args, **named: pytest.fail()
    )
    with serving(*models, *LIMITS) as server:
        server.complete(prompt="a", max_tokens=1)
        body = CompletionBody(prompt="a")
        server.engine.warm_up(server.admission.make_submission(body, print))
        rounds = loop.run_rounds(
            server.admission.make_submission(body, print).variant.engine.method
        )
        before = rounds._cache_size()
        for length in (600, 1, 200):
            assert server.complete(prompt=[5] * length, max_tokens=100)["choices"]
        assert rounds._cache_size() == before


@pytest.mark.slow
def test_clients_that_mean_it_ill_keep_nobody_from_being_served():
    """A short run of the tool behind the figures of docs/server.md, in processes of its own."""
    tool = [sys.executable, "docs/tools/measure_fairness.py", "--minutes", "0.5", "--clients", "16"]
    done = subprocess.run(tool, check=True, capture_output=True, text=True, cwd=ROOT)
    counts = ast.literal_eval(re.search(r"^counts: (.*)$", done.stdout, re.M)[1])
    small = {kind for kind in counts if kind.startswith("small")}
    assert small == {"small: 200"}, counts
    assert {kind for kind in counts if kind.startswith("1 MB")} == {"1 MB: 400"}, counts
    assert counts["512 rows: 200"] >= 1 and counts["new method: 200"] >= 1, counts
    loaded = re.search(r"^/health under load: .*, ([\d.]+) at the 99th", done.stdout, re.M)
    assert float(loaded[1]) < 1000 * slowdown(), "a text of 1 MB once took 600 ms of the loop"
    assert "ended with 0" in done.stdout and "Traceback" not in done.stdout


def test_a_client_that_leaves_frees_its_longer_prompt(server, monkeypatch):
    compiling = CompilingInBackground()
    monkeypatch.setattr(engine_thread, "warm_up_in_background", compiling)
    body = CompletionBody(prompt=[5] * 450, max_tokens=2)
    submission = server.admission.make_submission(body, lambda *_: None)
    server.engine.submit(submission)
    until(lambda: compiling.calls)
    server.engine.cancel(submission)
    until(lambda: not server.engine.num_waiting and not server.engine.num_running)
    compiling.end.set()
    assert server.complete(prompt="a", max_tokens=2)["choices"]


def test_few_new_methods_wait_to_compile(server, compiling, pool):
    def ask(gamma, address):
        body = {"prompt": "a", "max_tokens": 1, "method": "block", "options": {"gamma": gamma}}
        return pool.submit(server.ask, "POST", "/v1/completions", body, address)

    asks = [ask(gamma, A) for gamma in range(3, 7)]
    until(lambda: len(server.engine._programs._new) == MAX_NEW // 2)
    status, answer, headers = ask(7, A).result()
    assert status == 429 and answer["error"]["param"] == "method" and headers["retry-after"]
    asks.append(ask(3, A))  # one that compiles already
    asks.append(ask(8, B))
    until(lambda: len(server.engine._programs._new) == MAX_NEW // 2 + 1)
    assert server.complete(prompt="a", max_tokens=4)["choices"]
    compiling.end()
    assert [ask.result()[0] for ask in asks] == [500] * 6
    assert compiling.most == 1, "one new variant runs at a time"
    until(lambda: not server.engine._programs._new)


def test_a_client_that_leaves_frees_its_new_method(server, compiling):
    body = {"prompt": "a", "max_tokens": 1, "method": "block", "options": {"gamma": 9}}
    submission = server.admission.make_submission(CompletionBody(**body), lambda *_: None)
    method = submission.variant.engine.method
    loop.run_rounds(method)
    server.engine.submit(submission)
    until(lambda: compiling.most)
    server.engine.cancel(submission)
    compiling.end()
    until(lambda: not server.engine._programs._new)
    until(lambda: method not in loop.run_rounds.made)


def test_methods_that_are_not_allowed(models):
    with serving(*models, *LIMITS, "--methods", "block", "--set", "gamma=3") as server:
        for body, says in (
            ({"method": "autoregressive"}, "this server allows block, speculative"),
            ({"options": {"gamma": 4}}, "only those that compile nothing new"),
            ({"method": "block", "options": {"gamma": 3}}, "only those that compile nothing new"),
        ):
            status, answer, _ = server.ask("POST", "/v1/completions", {"prompt": "a"} | body)
            assert status == 400 and says in answer["error"]["message"]
            assert answer["error"]["param"] == ("options" if "options" in body else "method")
        for body in ({}, {"method": "speculative"}, {"options": {"gamma": 3}}):
            server.admission.make_submission(CompletionBody(prompt="a", **body), print)
    with pytest.raises(OptionError, match="did you mean 'block'"):
        _allowed_methods("blok")
    assert _allowed_methods("none") == [] and _allowed_methods(None) is None


def forgotten_methods(monkeypatch):
    """The methods whose programs are dropped from here on."""
    forgotten = []
    monkeypatch.setattr(programs, "forget", lambda methods, kept: forgotten.extend(methods))
    return forgotten


def test_programs_of_old_methods_are_dropped(monkeypatch):
    forgotten = forgotten_methods(monkeypatch)
    known = Programs()
    for i in range(MAX_COMPILED + 2):
        known.expect((f"method {i}", False), "a")
        known.compiled((f"method {i}", False))
    known.compiled(("method 0", False))  # used again
    assert known.keep(used=[("method 1", False)], busy=[("method 2", True)])
    # method 2 is busy with log-probabilities: its programs stay.
    assert forgotten == ["method 3"] and known.is_new(("method 2", False))
    assert not known.is_new(("method 0", False)) and not known.is_new(("method 1", False))
    assert known.keep(used=[(f"method {i}", False) for i in (3, 4)], busy=[])
    assert forgotten == ["method 3", "method 1"]
    assert not known.keep(used=[(f"method {i}", False) for i in (3, 4)], busy=[])
    with pytest.raises(TooManyNew):
        for i in range(100, 100 + MAX_NEW):
            known.expect((f"method {i}", False), "a")


def test_programs_stay_while_a_variant_of_their_method_is_kept(monkeypatch):
    forgotten = forgotten_methods(monkeypatch)
    known = Programs()
    for key in [("M", False), ("M", True), *((str(i), False) for i in range(MAX_COMPILED - 1))]:
        known.begin(key)
        known.compiled(key)
    known.keep([], [])
    assert known.is_new(("M", False)) and not known.is_new(("M", True)) and forgotten == []
    known.begin(("last", False))
    known.compiled(("last", False))
    known.keep([], [])
    assert forgotten == ["M"]


def test_programs_of_a_variant_whose_client_left_are_dropped(monkeypatch):
    """Once its scheduler is gone, too: no row of it has ended, but it may have compiled."""
    forgotten = forgotten_methods(monkeypatch)
    known = Programs()
    known.expect(("left", False), "a")
    assert not known.keep([("left", False)], [("left", False)])
    assert not known.keep([("left", False)], [])  # a scheduler without requests
    assert known.keep([], []) and forgotten == ["left"]
    assert not known.keep([], []) and forgotten == ["left"]


FREED = """
import time
from infer.serve import memory
memory.SECONDS = memory.REGULARLY = 0.1
with memory.limited_memory():
    blocks = [bytes(20_000) for _ in range(10_000)]
    del blocks[::2], blocks[::3]  # what stays is everywhere in the heap
    blocks = blocks[::100]
    ends = time.monotonic() + 120
    while memory.resident() > 100 * 2**20 and time.monotonic() < ends:
        time.sleep(0.05)
    print(memory.resident() >> 20)
"""


def test_freed_memory_is_given_back():
    """Although blocks that are in use stand between freed ones; a server's own never ends there."""
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, cwd=ROOT)
    assert int(done.stdout) < 100, done


def test_forgotten_programs_are_made_again(server):
    method = server.admission.make_submission(
        CompletionBody(prompt="a"), print
    ).variant.engine.method
    programs = (loop.run_rounds, loop.with_counts, loop.with_grammar_states)
    before = [program(method) for program in programs]
    assert all(program(method) is made for program, made in zip(programs, before, strict=True))
    loop.forget(method)
    assert not any(program(method) is made for program, made in zip(programs, before, strict=True))
    assert server.complete(prompt="a", max_tokens=2)["choices"]
