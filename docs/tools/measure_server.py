"""The server under load, for the figures of docs/server.md; some clients disconnect.

  python docs/tools/measure_server.py --minutes 5 --clients 64

It starts ``python -m infer.serve`` on the embedded pair. It sends random requests with a few seeds
and settings, streamed or not, and leaves a third of them at a random moment. At the end it prints
how many were answered, whether equal requests always had the same text, and the server's memory
over time.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

PROMPTS = ("def fib(n):", "class Stack:\n", "import os\n\n\ndef walk(", "for i in range(")
SETTINGS = ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0})
LEAVES = 1 / 3  # of the clients' requests


class Load:
    """Clients of one server, and the answers and errors that they got."""

    def __init__(self, port: int):
        self.port = port
        self.counts: collections.Counter[str] = collections.Counter()
        self.texts: dict[str, set[str]] = collections.defaultdict(set)
        self.stop = threading.Event()
        self._lock = threading.Lock()

    def client(self, seed: int) -> None:
        """Requests one after the other until the load ends."""
        rng = random.Random(seed)
        while not self.stop.is_set():
            seen = self._request(rng)
            with self._lock:
                self.counts[seen] += 1

    def _request(self, rng: random.Random) -> str:
        body = {"prompt": rng.choice(PROMPTS), "max_tokens": rng.choice((8, 24, 64))}
        body |= rng.choice(SETTINGS) | {"seed": rng.randrange(2), "stream": rng.random() < 0.5}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            if rng.random() < LEAVES:
                time.sleep(rng.random() * 2)
                return "left"
            answer = connection.getresponse()
            data = answer.read()
            if answer.status != 200:
                return str(answer.status)
            with self._lock:
                stream = body.pop("stream")
                self.texts[json.dumps(body)].add(_text(data, stream))
            return "answered"
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        finally:
            connection.close()


def _text(data: bytes, stream: bool) -> str:
    if not stream:
        return json.loads(data)["choices"][0]["text"]
    events = data.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], events[-2:]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def metric(port: int, name: str) -> float:
    """A gauge or counter of the server, over all labels."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    found = re.findall(rf"^specjax_{name}(?:{{.*}})? (\S+)$", page, re.M)
    return sum(map(float, found))


def memory(pid: int) -> float:
    """Resident MiB of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=64)
    args = parser.parse_args()
    command = [sys.executable, "-m", "infer.serve", "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    port = int(re.search(r":(\d+)$", server.stderr.readline())[1])
    load = Load(port)
    threads = [threading.Thread(target=load.client, args=(n,)) for n in range(args.clients)]
    for thread in threads:
        thread.start()
    ends, samples = time.monotonic() + 60 * args.minutes, []
    while time.monotonic() < ends:
        time.sleep(min(20, 20 * args.minutes))
        samples.append(round(memory(server.pid)))
        waiting, running = metric(port, "rows_waiting"), metric(port, "rows_in_flight")
        print(f"{samples[-1]} MiB, {waiting:g} waiting, {running:g} running, {dict(load.counts)}")
    load.stop.set()
    for thread in threads:
        thread.join()
    for _ in range(600):
        if not metric(port, "rows_in_flight") + metric(port, "rows_waiting"):
            break
        time.sleep(0.1)
    print("rows left over:", metric(port, "rows_in_flight") + metric(port, "rows_waiting"))
    print("counts:", dict(load.counts), "tokens:", metric(port, "written_tokens_total"))
    print("requests with more than one text:", sum(len(t) > 1 for t in load.texts.values()))
    print("of", len(load.texts), "different ones; MiB over time:", samples)
    server.send_signal(signal.SIGTERM)
    print("ended with", server.wait(timeout=60), "and said", repr(server.stderr.read()))


if __name__ == "__main__":
    main()
