"""How much slower than usual this machine is, for tests whose bounds are seconds."""

import time

STEPS = 500_000
USUAL_SECONDS = 0.033  # for these steps, on the machine where bounds were set


def slowdown() -> float:
    """By how much bounds are to grow; at least 1. Other work on the machine counts, too."""
    began = time.perf_counter()
    total = 0
    for step in range(STEPS):
        total += step
    return max(1.0, (time.perf_counter() - began) / USUAL_SECONDS)
