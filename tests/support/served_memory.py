"""The memory of a server after many clients: python tests/support/served_memory.py MODEL CLIENTS

It prints JSON, in bytes: ``before`` is the process's resident memory after a first short request,
``after`` what it is when all clients have their answers, ``most`` the largest on the way, and
``bound`` what the server may keep for a method: batch slots, a prompt's prefill, kept prompts.
"""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import specjax as sj
from infer.serve.admission import Admission
from infer.serve.memory import limited_memory, resident
from support.serving import Running, serving

LIMITS = ("--max-prompt", "512", "--max-output", "32", "--batch-size", "8", "--prefixes", "4")
SECONDS = 0.2  # between two looks


def main(name: str, clients: int) -> None:
    """Serves a model's floats to clients that all come at once."""
    model = sj.load(name, dtype="float32", quantize="none")
    with limited_memory(), serving(model, None, *LIMITS) as server:
        ask(server, [7] * 16)
        before = resident()
        ended = threading.Event()
        looks = [before]

        def look() -> None:
            while not ended.wait(SECONDS):
                looks.append(resident())

        watcher = threading.Thread(target=look)
        watcher.start()
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(lambda prompt: ask(server, prompt), prompts(clients)))
        ended.set()
        watcher.join()
        figures = {"before": before, "after": resident(), "most": max(looks)}
        print(json.dumps(figures | {"bound": most_bytes(server.admission)}))


def most_bytes(admission: Admission) -> int:
    """What the default method's slots, a prompt's prefill and the kept prompts may take."""
    engine, kept = admission._engine(admission.method, admission.defaults, True)
    return admission._needed(engine) + kept * admission._bytes(engine, 1)


def prompts(clients: int) -> list[list[int]]:
    """A prompt for each client: one of the longest allowed, and others of at least half of that."""
    generator = np.random.Generator(np.random.Philox(0))
    lengths = [512, *generator.integers(256, 512, clients - 1).tolist()]
    return [generator.integers(1000, 40_000, length).tolist() for length in lengths]


def ask(server: Running, prompt: list[int]) -> None:
    """One request, from an address of its own, so that no client's share refuses it."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    address = f"127.0.1.{prompt[0] % 250 + 1}"
    status, answer, _ = server.ask("POST", "/v1/completions", body, address)
    assert status == 200, answer


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
