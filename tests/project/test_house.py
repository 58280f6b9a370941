"""What holds the house together: which module may import which, and what an import costs."""

import ast
import functools
import graphlib
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("specjax", "infer", "train")
ROOMS = {"infer": ("run", "bench", "tune", "serve", "lm_eval"), "train": ("lm", "sdsat", "demo")}
HELP_SECONDS = 0.3


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def sources() -> dict[str, ast.Module]:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {name_of(path): ast.parse(path.read_text()) for path in paths}


def is_for_types(node: ast.AST) -> bool:
    """``if TYPE_CHECKING:``, which never runs."""
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def imports(tree: ast.AST, inside: bool = False):
    """(imported name, whether inside a function) of everything below ``tree`` that runs."""
    for node in ast.iter_child_nodes(tree):
        if is_for_types(node):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", inside) for alias in node.names)
        yield from imports(node, inside or isinstance(node, ast.FunctionDef))


@functools.cache
def graph() -> dict[str, set[str]]:
    """Each module's modules of ours."""

    def module_of(name: str) -> str | None:
        while name and name not in sources():
            name = name.rpartition(".")[0]
        return name or None

    return {
        module: {module_of(name) for name, _ in imports(tree)} - {None, module}
        for module, tree in sources().items()
    }


def test_no_circle_of_imports():
    try:
        tuple(graphlib.TopologicalSorter(graph()).static_order())
    except graphlib.CycleError as error:
        raise AssertionError(" → ".join(error.args[1])) from None


def room_of(module: str) -> str | None:
    """``infer.run`` of ``infer.run.job``; None outside the rooms."""
    package, room, *_ = (*module.split("."), "", "")
    return f"{package}.{room}" if room in ROOMS.get(package, ()) else None


def test_no_arrow_leaves_the_library_or_enters_another_room():
    for module, others in graph().items():
        for other in others:
            if module.startswith("specjax"):
                assert other.startswith("specjax"), f"{module} imports {other}"
            mine, theirs = room_of(module), room_of(other)
            assert mine is None or theirs in (None, mine), f"{module} imports {other}"
            assert not {module[:5], other[:5]} >= {"infer", "train"}, f"{module} imports {other}"


def test_imports_of_our_own_stand_at_the_top():
    late = [
        f"{module}: {name}"
        for module, tree in sources().items()
        for name, inside in imports(tree)
        if inside and name.split(".")[0] in PACKAGES
    ]
    assert not late


def test_the_formatter_decides_everywhere():
    for folder in (*PACKAGES, "tests", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            assert path == Path(__file__) or "fmt: " not in path.read_text(), path


def test_importing_the_library_loads_no_jax():
    code = "import sys, specjax, specjax._util.program; assert 'jax' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("program", ["infer.run", "infer.bench", "infer.tune", "infer.serve"])
def test_help_is_there_at_once(program):
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-X", "importtime", "-m", program, "--help"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and "usage:" in done.stdout
        assert " jax" not in done.stderr
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # Processor time, the least of three: other work on the machine is not ours.
    assert min(seconds() for _ in range(3)) < HELP_SECONDS
