"""A server's memory after many clients: python docs/tools/measure_served_memory.py TARGET

It starts ``python -m infer.serve --warm-up``, so that all programs are compiled before the first
client. Then all clients come at once, each with a long prompt of its own. It prints in MiB what the
server took before and after them, the most on the way, and the bound that the server itself states:
``specjax_kv_cache_max_bytes`` of its metrics. It needs Linux.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import IO

import numpy as np
from measure_server import memory, metric

LIMITS = ("--max-prompt", "512", "--max-output", "32", "--batch-size", "8", "--prefixes", "4")
SECONDS = 0.2  # between two looks
URL = re.compile(r"http://127\.0\.0\.1:(\d+)$")
SETTLED = 12.0  # seconds after which the server has given back what it freed


def main() -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target")
    parser.add_argument("--clients", type=int, default=64)
    args = parser.parse_args()
    print(json.dumps(measure(args.target, args.clients)))


def measure(target: str, clients: int) -> dict[str, float]:
    """MiB before and after the clients, the most on the way, and the server's bound."""
    command = [sys.executable, "-m", "infer.serve", "--port", "0", "--target", target]
    command += ["--dtype", "float32", "--quantize", "none", "--warm-up", *LIMITS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            port = _port(server.stderr)
            # What it writes is read, or it would wait with a full pipe.
            threading.Thread(target=collections.deque, args=(server.stderr, 0)).start()
            return _served(server.pid, port, clients)
        finally:
            server.send_signal(signal.SIGTERM)


def _port(log: IO[str]) -> int:
    said = []
    for line in log:
        found = URL.search(line)
        if found:
            return int(found[1])
        said.append(line)
    raise SystemExit(f"the server ended: {''.join(said).strip()}")


def _served(pid: int, port: int, clients: int) -> dict[str, float]:
    ask(port, [7] * 16)
    time.sleep(SETTLED)
    before = memory(pid)
    looks = [before]
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(SECONDS):
            looks.append(memory(pid))

    watcher = threading.Thread(target=look)
    watcher.start()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda prompt: ask(port, prompt), prompts(clients)))
    time.sleep(SETTLED)
    ended.set()
    watcher.join()
    bound = metric(port, "kv_cache_max_bytes") / 2**20
    return {"before": before, "after": memory(pid), "most": max(looks), "bound": bound}


def prompts(clients: int) -> list[list[int]]:
    """A prompt for each client: one of the longest allowed, and others of at least half of that."""
    generator = np.random.Generator(np.random.Philox(0))
    lengths = [512, *generator.integers(256, 512, clients - 1).tolist()]
    return [generator.integers(1000, 40_000, length).tolist() for length in lengths]


def ask(port: int, prompt: list[int]) -> None:
    """One request, of eight new tokens."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    assert answer.status == 200, data


if __name__ == "__main__":
    main()
