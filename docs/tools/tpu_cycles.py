"""What the TPU compiler expects a compiled program to cost, read from its text: no TPU needed.

Every instruction of a program that libtpu compiled carries ``estimated_cycles``. They come from a
cost model and are no measurement. Use them for ratios within one chip. Calls into libtpu's library
(such as top-k) carry none, and launches cost nothing.
"""

from __future__ import annotations

import collections
import math
import os
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

EXCHANGES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
Turns = Callable[[str], float]  # named path → turns of a loop that ends on data


def cycles(
    text: str,
    part_of: Callable[[str, str], str],
    turns: Turns,
    loop: bool = False,
    calls: Callable[[str], float] = lambda instruction: 0,
) -> collections.Counter:
    """Cycles of a program, or of one turn of its first loop, by part.

    ``part_of(path, instruction)`` names an instruction's part; ``path`` is its place in the
    traced program, with its named scopes. A conditional costs its most expensive branch. The text
    has no cycles for a kernel's call, so ``calls(instruction)`` must give them.
    """

    def count(path: str, line: str) -> collections.Counter:
        if said := _first(r'"estimated_cycles":"(\d+)"', line):
            return collections.Counter({part_of(path, line): int(said)})
        if " custom-call(" in line:
            return collections.Counter({part_of(path, line): calls(line)})
        return collections.Counter()

    return _totals(text, count, turns, loop)


class Exchanged(NamedTuple):
    """How many exchanges there are, and the bytes that they bring each device."""

    count: int
    bytes: int


def exchanged(text: str, turns: Turns, without: str, loop: bool = False) -> Exchanged:
    """The exchanges between devices in a program, or in one turn of its first loop.

    Those in the scope ``without`` do not count.
    """

    def count(path: str, line: str) -> collections.Counter:
        kind = re.search(rf" ({'|'.join(EXCHANGES)})(-start)?\(", line)
        if not kind or without in path.split("/"):
            return collections.Counter()
        arrays = re.findall(r"[a-z](\d+)\[([\d,]*)\]", line[: kind.start()].split(" = ")[1])
        if kind.group(2) and kind.group(1) != "all-reduce":
            arrays = arrays[1:]  # the operand comes before the result
        return collections.Counter(exchanges=1, bytes=sum(_bytes_of(*array) for array in arrays))

    found = _totals(text, count, turns, loop)
    return Exchanged(found["exchanges"], found["bytes"])


def _totals(
    text: str, count: Callable[[str, str], collections.Counter], turns: Turns, loop: bool
) -> collections.Counter:
    """The sum of ``count(path, instruction)`` over a program, or one turn of its first loop."""
    computations, entry = _computations(text)
    if loop:
        first = next(line for line in computations[entry] if " while(" in line)
        entry = _first(r"body=%?([\w.\-]+)", first)

    def cost(name: str) -> collections.Counter:
        total: collections.Counter = collections.Counter()
        for line in computations.get(name, ()):
            path = _first(r'op_name="([^"]*)"', line)
            if " while(" in line:
                body = cost(_first(r"body=%?([\w.\-]+)", line))
                times = _counted(computations, line) or turns(path)
                total.update({part: times * count for part, count in body.items()})
            elif " conditional(" in line:
                total.update(max(map(cost, _branches(line)), key=lambda c: c.total()))
            else:
                total.update(count(path, line))
        return total

    return cost(entry)


def bytes_per_cycle(device: jax.Device, rows: int = 8, shape=(28672, 4096)) -> float:
    """Bytes of bfloat16 weights that a product of ``rows`` rows reads per cycle at best."""
    return 2 * shape[0] * shape[1] / _product(device, rows, shape)


def products_per_cycle(device: jax.Device, rows: int = 4096, shape=(28672, 4096)) -> float:
    """Multiplications of bfloat16 numbers per cycle in a product of ``rows`` rows."""
    return rows * shape[0] * shape[1] / _product(device, rows, shape)


def without_sparse_cores() -> None:
    """Turns sparse cores off; call it before libtpu starts.

    JAX cannot read the text of a program in which they gather the embedding.
    """
    os.environ.setdefault("LIBTPU_INIT_ARGS", "--xla_tpu_offload_gather_to_sparsecore=false")


def _product(device: jax.Device, rows: int, shape: tuple[int, int]) -> int:
    """Cycles of ``x[rows, i] @ w[o, i].T``."""
    one = SingleDeviceSharding(device)
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=one) for s in ((rows, shape[1]), shape))
    product = jax.jit(lambda x, w: jnp.einsum("ni,oi->no", x, w)).lower(x, w).compile()
    return cycles(product.as_text(), lambda path, line: "", lambda path: 1).total()


def _bytes_of(bits: str, shape: str) -> int:
    """Of an array such as ``f32[8,7]``."""
    return int(bits) // 8 * math.prod(int(size) for size in shape.split(",") if size)


def _counted(computations: dict[str, list[str]], line: str) -> int:
    """Turns of a loop that counts up to a constant; 0 if its end depends on data."""
    if known := _first(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(known)
    condition = computations.get(_first(r"condition=%?([\w.\-]+)", line), [])
    ends = _first(r"ROOT .* compare\([^,]*, %([\w.\-]+)\), direction=LT", "\n".join(condition))
    pattern = rf"%{re.escape(ends)} = s32\[\][^ ]* constant\((\d+)\)"
    return int(_first(pattern, "\n".join(condition)) or 0) if ends else 0


def _first(pattern: str, line: str) -> str:
    found = re.search(pattern, line)
    return found.group(1) if found else ""


def _branches(line: str) -> list[str]:
    listed = _first(r"branch_computations=\{([^}]*)\}", line)
    names = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line)
    return names + [name.strip().lstrip("%") for name in listed.split(",") if listed]


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The instructions of every computation, and the entry's name."""
    found: dict[str, list[str]] = {}
    entry, name = "", None
    for line in text.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.\-]+) (\(.*\) -> .*)?\{\s*$", line)
        if head:
            name = head.group(2)
            found[name] = []
            entry = name if head.group(1) else entry
        elif line.rstrip() == "}":
            name = None
        elif name and line.startswith("  "):
            found[name].append(line)
        elif name and found[name]:  # a kernel's call spans several lines
            found[name][-1] += line
    return found, entry
