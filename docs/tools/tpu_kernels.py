"""What splash attention's kernels cost on a TPU; a compiled program's text does not say it.

The compiler schedules a kernel into bundles of instructions, one a cycle. libtpu writes them to
files if a flag asks for it. A call costs its turns of the grid, its visited blocks, and the first
and last block of each row of blocks, as often as the kernel's table has them. A visited block takes
at least the time of its matrix products at the peak rate. Waiting for the matrix unit or for memory
is not counted.
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
PRODUCTS = {FORWARD: 2, BACKWARD: 5}  # matrix products per visited block
DUMP = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"


class Kernel(NamedTuple):
    """Bundles per turn of the grid, per visited block, and per row (its first and last block)."""

    turn: int
    met: int
    ends: int


class Met(NamedTuple):
    """Counts for one head: turns of the grid, visited blocks, and rows of blocks."""

    turns: int
    blocks: int
    rows: int

    def cycles(self, kernel: Kernel, least: float = 0) -> float:
        """Cycles of one head, if a visited block takes at least ``least``."""
        met = max(kernel.met, least)
        return self.turns * kernel.turn + self.blocks * met + self.rows * kernel.ends


class Call(NamedTuple):
    """A kernel's call in a compiled text.

    ``heads`` counts those of all rows, ``size`` is the head size, and ``blocks`` has the queries
    and keys of a block.
    """

    name: str
    heads: int
    tokens: int
    size: int
    blocks: tuple[int, int]

    def cycles(self, kernel: Kernel, table: np.ndarray, rate: float) -> float:
        """Cycles on one core that does ``rate`` multiplications a cycle."""
        least = PRODUCTS[self.name] * self.size * math.prod(self.blocks) / rate
        return self.heads * met_of(self.name, table).cycles(kernel, least)


def met_of(name: str, table: np.ndarray) -> Met:
    """Counts for one head, from a table of query and key blocks; 0 marks a skipped block."""
    return Met(table.size, np.count_nonzero(table), table.shape[name == BACKWARD])


def parse_call(line: str) -> Call | None:
    """The call in an instruction's line, or None if it calls none of the kernels."""
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
    texts = _bundles(script, tuple(PRODUCTS))
    return {name: schedule(text) for name, text in texts.items()}


def turn_bundles(script: list[str], name: str) -> int:
    """Bundles of one turn of the grid, of the kernel of this name that ``script`` compiles.

    All branches count.
    """
    marks = _marks(_bundles(script, (name,))[name])
    start = next(at for at, kind in marks if kind == "LB")
    return marks[-1][0] - start


def regions_of(script: list[str], name: str) -> tuple[int, list[int]]:
    """Bundles of one turn of the grid, of the kernel of this name that ``script`` compiles.

    First those of each turn, then those of each region that a branch may skip.
    """
    marks = _marks(_bundles(script, (name,))[name])
    start = next(at for at, kind in marks if kind == "LB")
    regions = _skipped(marks)
    return marks[-1][0] - start - sum(regions), regions


def _skipped(marks: list[tuple[int, str]]) -> list[int]:
    """Bundles of the regions that a branch may skip."""
    kinds = ("branch", "PF")
    return [b - a for (a, x), (b, y) in itertools.pairwise(marks) if (x, y) == kinds]


def _bundles(script: list[str], names: tuple[str, ...]) -> dict[str, str]:
    """The bundles of the kernels that ``script`` compiles, by name."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"LIBTPU_INIT_ARGS": DUMP.format(folder)}
        done = subprocess.run([sys.executable, *script], env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr.strip().splitlines()[-1])
        files = list(Path(folder).glob("*-final_bundles.txt"))
        texts = {n: x for n in names for x in files if n in x.name and "analysis" not in x.name}
        return {name: file.read_text() for name, file in texts.items()}


def _marks(bundles: str) -> list[tuple[int, str]]:
    """Places in a kernel's bundles: where a loop begins, a branch goes, or a region ends."""
    marks = []
    for line in bundles.splitlines():
        place = re.match(r"\s*(0x[0-9a-f]+)\s+(LB|PF)?", line)
        if place and (place[2] or "sbr.rel" in line):
            marks.append((int(place[1], 16), place[2] or "branch"))
    return marks


def schedule(bundles: str) -> Kernel:
    """Reads a kernel's schedule from its bundles.

    In a kernel's loop, branches may skip three regions: the row's first block, a visited block (the
    longest region), and the row's last block.
    """
    marks = _marks(bundles)
    start = next(at for at, kind in marks if kind == "LB")
    regions = _skipped(marks)
    if len(regions) != 3:
        sys.exit(f"a kernel of {len(regions)} regions: this libtpu's schedules are not understood")
    met = max(regions)
    return Kernel(marks[-1][0] - start - sum(regions), met, sum(regions) - met)
