"""What splash attention's kernels cost on a TPU; a compiled program's text does not say it.

The compiler schedules a kernel into bundles of instructions, one a cycle. libtpu writes them down
if it is told to at its start. A call costs its turns of the grid, the blocks that it visits, and
the ends of its rows of blocks, as often as the kernel's table says. A visited block takes at least
the time of its products at their best. Bundles wait neither for the matrix unit nor for memory.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

FORWARD, BACKWARD = "splash_mha_fwd", "splash_mha_dkv"
PRODUCTS = {FORWARD: 2, BACKWARD: 5}  # of a kernel, per block
DUMP = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"


class Kernel(NamedTuple):
    """Bundles of a turn of the grid, of a block that is met, and of a row's first and last one."""

    turn: int
    met: int
    ends: int


class Met(NamedTuple):
    """Of one head: turns of the grid, blocks that are met, and rows of blocks."""

    turns: int
    blocks: int
    rows: int

    def cycles(self, kernel: Kernel, least: float = 0) -> float:
        """Where a block that is met takes ``least``, or more."""
        met = max(kernel.met, least)
        return self.turns * kernel.turn + self.blocks * met + self.rows * kernel.ends


class Call(NamedTuple):
    """In a compiled text: heads of all rows, and ``blocks`` of so many queries and keys."""

    name: str
    heads: int
    tokens: int
    size: int
    blocks: tuple[int, int]

    def cycles(self, kernel: Kernel, table: np.ndarray, rate: float) -> float:
        """Of one core that multiplies so often in a cycle."""
        least = PRODUCTS[self.name] * self.size * math.prod(self.blocks) / rate
        return self.heads * met_of(self.name, table).cycles(kernel, least)


def met_of(name: str, table: np.ndarray) -> Met:
    """Of one head, by a table of blocks of queries and of keys: 0 for those that are skipped."""
    return Met(table.size, np.count_nonzero(table), table.shape[name == BACKWARD])


def parse_call(line: str) -> Call | None:
    """None where the instruction calls none of the kernels."""
    name = next((name for name in PRODUCTS if name in line), None)
    if name is None:
        return None
    queries = re.search(r"constraints=\{.*?bf16\[([\d,]+)\]", line)[1]
    *heads, tokens, size = map(int, queries.split(","))
    kind = "_dkv" if name == BACKWARD else ""
    block, wide = (
        int(re.search(rf'block_{axis}{kind}\\*": (\d+)', line)[1]) for axis in ("q", "kv")
    )
    return Call(name, math.prod(heads), tokens, size, (block, wide))


def schedules(script: list[str]) -> dict[str, Kernel]:
    """The kernels that ``script``, a Python program and its arguments, compiles; by name."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"LIBTPU_INIT_ARGS": DUMP.format(folder)}
        done = subprocess.run([sys.executable, *script], env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr.strip().splitlines()[-1])
        files = list(Path(folder).glob("*splash*-final_bundles.txt"))
        texts = {n: x for n in PRODUCTS for x in files if n in x.name and "analysis" not in x.name}
        return {name: schedule(x.read_text()) for name, x in texts.items()}


def schedule(bundles: str) -> Kernel:
    """A kernel's loop is one row of bundles, of which three regions are each skipped by a branch:
    the row's first block, a block that is met, which is the longest, and the row's last one."""
    marks = []
    for line in bundles.splitlines():
        place = re.match(r"\s*(0x[0-9a-f]+)\s+(LB|PF)?", line)
        if place and (place[2] or "sbr.rel" in line):
            marks.append((int(place[1], 16), place[2] or "branch"))
    start = next(at for at, kind in marks if kind == "LB")
    kinds = ("branch", "PF")
    regions = [b - a for (a, x), (b, y) in itertools.pairwise(marks) if (x, y) == kinds]
    if len(regions) != 3:
        sys.exit(f"a kernel of {len(regions)} regions: this libtpu's schedules are not understood")
    met = max(regions)
    return Kernel(marks[-1][0] - start - sum(regions), met, sum(regions) - met)
