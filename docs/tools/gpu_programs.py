"""What XLA makes of a program for an H100, read from what the compiler dumps: no GPU needed.

XLA writes the list of what the runtime will do ("thunks"): kernels, copies, loops, conditionals,
and which of them are one CUDA graph. A loop or a conditional outside of a graph copies its
predicate to the host and waits for it.

Nothing is autotuned without a GPU, so a matrix product is one fallback kernel, and no time is
known. Two programs can be compared by their structure. `h100.txtpb` beside this file describes the
device. It names driver and runtime versions, without which no graph holds a loop.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental import topologies

DEVICE = Path(__file__).with_name("h100.txtpb")
THUNK = re.compile(
    r"^(?P<indent>\s*)(?P<number>\d+): (?P<kind>k\w+)\s*(?:\[.*?\])?\s*(?P<name>\S*)"
)
METADATA = re.compile(r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)')
TRIP_COUNT = re.compile(r'%(\S+) = [^\n]* while\([^\n]*"known_trip_count":\{"n":"(\d+)"\}')
BRANCH = re.compile(r"^(?P<indent>\s*)(?:false_branch|true_branch|branch_\d+):\s*$")
# Not kernels: what only steers the others.
STEERING = ("kCommandBuffer", "kWhile", "kConditional")
SECTIONS = ("condition:", "body:")


@dataclasses.dataclass
class Thunk:
    """An entry of the runtime's list.

    ``parts`` are the lists of a graph (one), a loop (condition, body) or a conditional (branches).
    ``turns``: how often a loop turns, if the compiler knows. The host then reads no condition.
    """

    kind: str
    name: str
    number: int
    turns: int | None = None
    parts: list[list[Thunk]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Count:
    """What one turn of the outer loop runs: of a conditional, its longest branch.

    ``empty_conditions`` are loops in a graph whose condition is a flag that no kernel computes. On
    an H100 the rounds that had such loops wrote wrong tokens as a graph (JAX 0.11.2).
    """

    kernels: int = 0
    waits: int = 0
    graphs: int = 0
    sorts: int = 0
    empty_conditions: int = 0


@dataclasses.dataclass(frozen=True)
class GpuProgram:
    """A compiled program.

    Attributes:
      one_graph: whether one CUDA graph holds the outer loop.
      count: what a turn of the outer loop runs.
      temp_bytes: memory beside arguments and results.
      hlo: the optimized program.
    """

    one_graph: bool
    count: Count
    temp_bytes: int
    hlo: str


def gpu_devices(count: int = 1) -> list[jax.Device]:
    """H100s of one host, to compile for."""
    config = DEVICE.read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=config, topology=f"1x1x{count}"
    )
    return list(topology.devices)


def compile_for_gpu(
    lowered: jax.stages.Lowered, turns: int = 1, training: bool = False
) -> GpuProgram:
    """Compiles for the devices that the arguments lie on. Inner loops count ``turns`` times.

    In a step of training (``training``) loops count as often as they turn, where that is known, and
    the outer loop is the one over micro-batches.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = {
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
            "xla_dump_hlo_module_re": ".*",
        }
        compiled = lowered.compile(compiler_options=dump)
        thunks = parse_thunks(_thunk_text(Path(folder)))
        if training:
            _set_turns(thunks, _turns_of_loops(Path(folder), compiled.as_text()))

    memory = compiled.memory_analysis()
    loop, one_graph = _largest_loop(thunks) if training else _outer_loop(thunks)
    count = Count()
    parts = [thunks]
    if loop is not None:
        parts = loop.parts
        # Outside of a graph, the host reads the loop's condition at each turn.
        count.waits = 0 if one_graph or loop.turns else 1
    for part in parts:
        _add(part, count, turns, one_graph)
    return GpuProgram(one_graph, count, memory.temp_size_in_bytes, compiled.as_text())


def cache_copies(hlo: str, shape: str) -> int:
    """Copies of arrays of a shape such as ``bf16[…,8,2048,128]``, for any number of rows."""
    dtype, sizes = shape.split("[…")
    return len(re.findall(rf"= {dtype}\[\d+{re.escape(sizes)}\S* copy\(", hlo))


def parse_thunks(text: str) -> list[Thunk]:
    """The runtime's list as a tree."""
    # An empty list is this remark, and the line goes on.
    lines = [line for line in text.replace("No thunks.", "\n").splitlines() if line.strip()]
    return _Parser(lines).sequence(0)


class _Parser:
    """Reads nested lists by their indentation. The first list of a loop or branch may have none."""

    def __init__(self, lines: list[str]):
        self.lines = lines
        self.at = 0

    def sequence(self, indent: int) -> list[Thunk]:
        """Thunks that are indented at least this far, up to a line that is none."""
        thunks = []
        while match := self._thunk(indent):
            self.at += 1
            thunk = Thunk(match["kind"], match["name"], int(match["number"]))
            depth = len(match["indent"])
            if thunk.kind == "kCommandBuffer":
                thunk.parts = [self.sequence(depth + 1)]
            elif thunk.kind == "kWhile":
                thunk.parts = [self._section(depth) for _ in SECTIONS]
            elif thunk.kind == "kConditional":
                thunk.parts = list(self._branches(depth))
            thunks.append(thunk)
        return thunks

    def _thunk(self, indent: int) -> re.Match | None:
        if self.at == len(self.lines):
            return None
        match = THUNK.match(self.lines[self.at])
        if match is None or len(match["indent"]) < indent:
            return None
        return match

    def _section(self, depth: int) -> list[Thunk]:
        assert self.lines[self.at].strip() in SECTIONS, self.lines[self.at]
        self.at += 1
        return self.sequence(depth + 1)

    def _branches(self, depth: int) -> Iterator[list[Thunk]]:
        while self.at < len(self.lines):
            match = BRANCH.match(self.lines[self.at])
            if match is None or len(match["indent"]) < depth:
                return
            self.at += 1
            yield self.sequence(depth + 1)


def _thunk_text(folder: Path) -> str:
    """The longest list of a dump: that of the program itself."""
    files = list(folder.glob("*thunk_sequence_after_thunk_passes.txt"))
    return max((file.read_text() for file in files), key=len)


def _outer_loop(thunks: list[Thunk], in_graph: bool = False) -> tuple[Thunk | None, bool]:
    """The first loop that no other holds, and whether it is in a graph."""
    for thunk in thunks:
        if thunk.kind == "kWhile":
            return thunk, in_graph

    for thunk in thunks:
        for part in thunk.parts:
            loop, held = _outer_loop(part, in_graph or thunk.kind == "kCommandBuffer")
            if loop is not None:
                return loop, held
    return None, False


def _largest_loop(thunks: list[Thunk], in_graph: bool = False) -> tuple[Thunk | None, bool]:
    """The loop with the most kernels of those that no other holds, and whether it is in a graph."""
    found = []
    for thunk in thunks:
        if thunk.kind == "kWhile":
            found.append((thunk, in_graph))
        elif thunk.parts:
            held = in_graph or thunk.kind == "kCommandBuffer"
            found += [_largest_loop(part, held) for part in thunk.parts]
    loops = [(loop, held) for loop, held in found if loop is not None]
    return max(loops, key=lambda pair: _size([pair[0]]), default=(None, False))


def _turns_of_loops(folder: Path, hlo: str) -> dict[int, int]:
    """How often the loops turn of which the compiler knows it, by their thunk's number."""
    known = {name: int(turns) for name, turns in TRIP_COUNT.findall(hlo)}
    metadata = max((file.read_text() for file in folder.glob("*thunk_metadata.txt")), key=len)
    named = METADATA.findall(metadata)
    return {int(number): known[name] for name, number in named if name in known}


def _set_turns(thunks: list[Thunk], turns: dict[int, int]) -> None:
    for thunk in thunks:
        if thunk.kind == "kWhile":
            thunk.turns = turns.get(thunk.number)
        for part in thunk.parts:
            _set_turns(part, turns)


def _add(thunks: list[Thunk], count: Count, turns: int, in_graph: bool, times: int = 1) -> None:
    """Adds what a list runs ``times`` times to ``count``."""
    for thunk in thunks:
        outside = 0 if in_graph else times
        if thunk.kind == "kCommandBuffer":
            count.graphs += outside
            _add(thunk.parts[0], count, turns, True, times)
        elif thunk.kind == "kWhile":
            condition, body = thunk.parts
            count.empty_conditions += in_graph and not condition
            if thunk.turns is not None:
                _add(body, count, turns, in_graph, times * thunk.turns)
                continue
            count.waits += outside * (turns + 1)
            _add(condition, count, turns, in_graph, times * (turns + 1))
            _add(body, count, turns, in_graph, times * turns)
        elif thunk.kind == "kConditional":
            count.waits += outside
            _add(max(thunk.parts, key=_size), count, turns, in_graph, times)
        else:
            count.kernels += times
            count.sorts += times * thunk.name.startswith("sort")


def _size(thunks: list[Thunk]) -> int:
    """Kernels of a list, those of all branches included."""
    own = sum(thunk.kind not in STEERING for thunk in thunks)
    return own + sum(_size(part) for thunk in thunks for part in thunk.parts)
