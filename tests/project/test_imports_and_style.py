"""Which module may import which, what an import costs, and the limits on style."""

import ast
import functools
import graphlib
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from support import sweeps, tools

ROOT = Path(__file__).parents[2]
PACKAGES = ("specjax", "infer", "train")
# Packages of infer/ and train/ that other packages may import. Every other folder is a program.
SHARED = {"infer.datasets", "train.config", "train.data", "train.engine"}
MAX_LONG_FUNCTIONS = 12  # over 50 lines: most are a public signature and its docstring
HELP_COST = 6  # of what the modules cost that every command line imports
measure_style = tools.load("measure_style")


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
    """Yields (imported name, whether inside a function) for each import below that runs."""
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
    """For each of our modules, which of our modules it imports."""

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


def packages(top: str) -> set[str]:
    """The packages directly below: ``infer.run``, ``train.lm``, ``specjax.core``."""
    folders = (path.parent for path in (ROOT / top).glob("*/__init__.py"))
    return {f"{top}.{folder.name}" for folder in folders}


def package_of(module: str) -> str:
    """``infer.run`` of ``infer.run.job``; a loose file is a package of its own."""
    package = ".".join(module.split(".")[:2])
    return package if package in packages(module.split(".")[0]) else module


def is_program(package: str) -> bool:
    """A package of ``infer`` or ``train`` that is not shared: each runs as a program."""
    return package in packages("infer") | packages("train") and package not in SHARED


def forbidden(graph: dict[str, set[str]]) -> list[str]:
    """The forbidden imports in ``graph``: out of the library, or into another program's package."""
    found = []
    for module, others in graph.items():
        mine = package_of(module)
        for other in others:
            theirs = package_of(other)
            tops = {module.split(".")[0], other.split(".")[0]}
            leaves_library = module.startswith("specjax") and not other.startswith("specjax")
            enters_program = is_program(theirs) and theirs != mine
            from_package = is_program(mine) or mine in SHARED
            if leaves_library or tops >= {"infer", "train"} or (enters_program and from_package):
                found.append(f"{module} imports {other}")
    return found


def test_no_import_leaves_the_library_or_enters_another_program():
    assert not forbidden(graph())


@pytest.mark.parametrize(
    ("module", "other"),
    [
        ("specjax.lm", "infer.cli"),
        ("infer.cli", "train.config"),
        ("infer.run.job", "infer.bench.cases"),
        ("train.head.training", "train.lm.losses"),
        ("train.data.packing", "train.sdsat.losses"),
    ],
)
def test_a_planted_arrow_is_found(module, other):
    assert forbidden({module: {other}}) == [f"{module} imports {other}"]


def test_every_shared_package_exists():
    assert packages("infer") | packages("train") >= SHARED


def test_no_circular_import_of_packages_in_the_library():
    arrows: dict[str, set[str]] = {}
    for module, others in graph().items():
        if module.startswith("specjax."):
            own = package_of(module)
            below = arrows.setdefault(own, set())
            below |= {package_of(other) for other in others if other != "specjax"} - {own}
    try:
        tuple(graphlib.TopologicalSorter(arrows).static_order())
    except graphlib.CycleError as error:
        raise AssertionError(" → ".join(error.args[1])) from None


def test_the_architecture_page_names_every_package():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for top in PACKAGES:
        for package in packages(top):
            assert f"{package.split('.')[1]}/" in page, package


def test_code_and_pages_read_as_they_should():
    """The limits of docs/tools/measure_style.py, which says what each number counts."""
    counts = measure_style.CodeCounts()
    for path in measure_style.tracked(measure_style.CODE, ".py"):
        counts.add(measure_style.count_code(path))
    numbers = measure_style.code_numbers(counts)
    assert numbers["parallel assignments"] <= 0.01, counts.parallel
    assert not counts.nested
    assert len(counts.long) <= MAX_LONG_FUNCTIONS, counts.long
    pages = measure_style.tracked(measure_style.PROSE, ".md")
    prose = measure_style.prose_numbers(path.read_text(encoding="utf-8") for path in pages)
    assert prose["words a sentence"] <= 17
    assert prose["over 40 words"] <= 0.04


def test_each_class_has_a_name_of_its_own():
    homes: dict[str, set[str]] = {}
    for module, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, set()).add(module)
    assert not {name: found for name, found in homes.items() if len(found) > 1}


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


@pytest.mark.parametrize("name", sweeps.STRIDES)
def test_a_test_whose_cases_are_left_to_sweeps_exists(name):
    file, function = name.split("::")
    assert f"def {function}(" in (ROOT / "tests" / file).read_text()


def test_importing_the_library_loads_no_jax():
    code = "import sys, specjax, specjax._util.program; assert 'jax' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "program", ["specjax", "infer.run", "infer.bench", "infer.tune", "infer.serve"]
)
def test_help_is_there_at_once(program):
    def seconds(*arguments: str) -> tuple[float, subprocess.CompletedProcess]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-X", "importtime", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done

    def seconds_of_help() -> float:
        taken, done = seconds("-m", program, "--help")
        assert "usage:" in done.stdout
        assert " jax" not in done.stderr
        return taken

    # Processor time, the lowest of five, because other work on the machine slows a run.
    modules = "import argparse, dataclasses, json, pathlib, subprocess, typing"
    base = min(seconds("-c", modules)[0] for _ in range(5))
    assert min(seconds_of_help() for _ in range(5)) < HELP_COST * base


@pytest.mark.parametrize("module", ["infer.run.job", "train.sdsat.training", "train.answers.job"])
def test_no_import_uses_a_device(module):
    """Processes that share devices must meet before."""
    code = f"import {module}; from jax._src import xla_bridge as bridge; "
    code += "print(bridge.backends_are_initialized())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"
