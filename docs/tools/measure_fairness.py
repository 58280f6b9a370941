"""The server under clients that mean it ill, for the figures of docs/server.md.

  python docs/tools/measure_fairness.py --minutes 5 --clients 64

It starts ``python -m infer.serve`` on the embedded pair. Each client has a loopback address of its
own. Four send texts of 1 MB, two open connections and never finish their headers, one asks for 512
rows, one for a method with new options every second. All others send small requests, one after the
other. A process of its own asks for ``/health`` twenty times a second, first while nothing else
happens. The clients have a low priority, because they stand for other machines. At the end the
script prints the times of ``/health`` and of the small requests, what was not answered, and the
server's memory over time.

The queue has 1,200 places, because a client gets at most half of those that the others leave free:
512 rows fit while 56 small requests wait. With the default of 512 they would all be refused.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time

from measure_server import PROMPTS, memory

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
QUIET_SECONDS = 15
HALF_OPEN = 200  # connections of each client that sends no whole headers
CLIENTS_NICE = 10
SAMPLE_SECONDS = 10  # between two looks at the server's memory
JSON = {"Content-Type": "application/json"}


def address(number: int) -> str:
    """A client's own address."""
    return f"127.0.{number // 250 + 1}.{number % 250 + 1}"


class Clients:
    """The clients of one server, and what they got."""

    def __init__(self, port: int):
        self.port = port
        self.stop = threading.Event()
        self.counts: collections.Counter[str] = collections.Counter()
        self.seconds: list[float] = []  # of the small requests
        self._lock = threading.Lock()

    def small(self, number: int) -> None:
        """Sends small requests, one after the other."""
        for i in itertools.count():
            if self.stop.is_set():
                return
            body = {"prompt": PROMPTS[i % len(PROMPTS)], "max_tokens": 8, "temperature": 0}
            began = time.perf_counter()
            status = self._ask(number, body)
            with self._lock:
                self.seconds.append(time.perf_counter() - began)
                self.counts[f"small: {status}"] += 1

    def large(self, number: int) -> None:
        """Sends texts of 1 MB."""
        while not self.stop.is_set():
            self._count("1 MB", self._ask(number, {"prompt": "a " * 500_000, "max_tokens": 8}))

    def many(self, number: int) -> None:
        """Asks for 512 rows at once."""
        while not self.stop.is_set():
            body = {"prompt": list(PROMPTS), "n": 128, "max_tokens": 8}
            self._count("512 rows", self._ask(number, body))
            time.sleep(0.1)

    def new(self, number: int) -> None:
        """Asks for a method with new options every second."""
        threads = []
        for gamma in itertools.cycle(range(2, 60)):
            if self.stop.wait(1.0):
                break
            body = {"prompt": PROMPTS[0], "max_tokens": 8, "options": {"gamma": gamma}}
            thread = threading.Thread(
                target=lambda body: self._count("new method", self._ask(number, body)), args=(body,)
            )
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()

    def slow(self, number: int) -> None:
        """Keeps connections open whose headers never end."""
        connections: list[socket.socket] = []
        while not self.stop.wait(0.02):
            try:
                place = ("127.0.0.1", self.port)
                connections.append(socket.create_connection(place, 5, (address(number), 0)))
                connections[-1].sendall(HALF)
            except OSError as error:
                self._count("half-sent", type(error).__name__)
            if len(connections) > HALF_OPEN:
                connections.pop(0).close()
        for connection in connections:
            connection.close()

    def _count(self, kind: str, status: object) -> None:
        with self._lock:
            self.counts[f"{kind}: {status}"] += 1

    def _ask(self, number: int, body: dict) -> object:
        """The status of a completion, or the name of an error."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=600, source_address=(address(number), 0)
        )
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), JSON)
            answer = connection.getresponse()
            answer.read()
            return answer.status
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        finally:
            connection.close()


def probe(port: int, results, stop) -> None:
    """Asks for ``/health`` until ``stop``; puts the seconds of each answer into ``results``."""
    seconds = []
    while not stop.wait(0.05):
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b'{"status": "ok"}'
        connection.close()
        seconds.append(time.perf_counter() - began)
    results.put(seconds)


class Probe:
    """A process that asks for ``/health`` while the block runs; then ``seconds`` has the times."""

    def __init__(self, port: int):
        context = multiprocessing.get_context("spawn")
        self._stop = context.Event()
        self._results = context.Queue()
        self._process = context.Process(target=probe, args=(port, self._results, self._stop))
        self.seconds: list[float] = []

    def __enter__(self) -> Probe:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.seconds = self._results.get(timeout=120)
        self._process.join()


def quantiles(seconds: list[float]) -> str:
    """Median, 99th percentile and maximum, in milliseconds."""
    ordered = sorted(seconds)
    picked = [ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99, 1)]
    middle, high, most = (f"{1000 * value:.1f}" for value in picked)
    return f"{middle} ms at the median, {high} at the 99th percentile, {most} at most"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=64)
    args = parser.parse_args()
    command = [sys.executable, "-m", "infer.serve", "--port", "0", "--queue", "1200"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    port = int(re.search(r":(\d+)$", server.stderr.readline())[1])

    with Probe(port) as quiet:
        time.sleep(QUIET_SECONDS)
    print("/health of an idle server:", quantiles(quiet.seconds), flush=True)

    clients = Clients(port)
    kinds = [clients.large] * 4 + [clients.slow] * 2 + [clients.many, clients.new]
    kinds += [clients.small] * (args.clients - len(kinds))
    threads = [threading.Thread(target=kind, args=(n,)) for n, kind in enumerate(kinds)]
    samples = []
    with Probe(port) as loaded:
        os.nice(CLIENTS_NICE)
        for thread in threads:
            thread.start()
        ends = time.monotonic() + 60 * args.minutes
        while time.monotonic() < ends:
            time.sleep(SAMPLE_SECONDS)
            samples.append(round(memory(server.pid)))
            print(f"{samples[-1]} MiB, {dict(clients.counts)}", flush=True)
    clients.stop.set()
    for thread in threads:
        thread.join()

    print("/health under load:", quantiles(loaded.seconds))
    print("small requests:", quantiles(clients.seconds))
    print("counts:", dict(sorted(clients.counts.items())))
    print(f"MiB every {SAMPLE_SECONDS} s:", samples)
    count = 60 // SAMPLE_SECONDS
    minutes = [samples[i : i + count] for i in range(0, len(samples), count)]
    print("MiB, median of each minute:", list(map(statistics.median, minutes)))
    server.send_signal(signal.SIGTERM)
    said = server.stderr.read()
    print("ended with", server.wait(timeout=120), "and said", len(said), "characters:", said[:500])


if __name__ == "__main__":
    main()
