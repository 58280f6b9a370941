"""The package as installed: version, typing marker, and what the library may import."""

import ast
import importlib.metadata
from pathlib import Path

import specjax

ROOT = Path(specjax.__file__).parent


def test_version_matches_the_distribution():
    assert importlib.metadata.version("specjax") == specjax.__version__


def test_library_is_typed():
    assert (ROOT / "py.typed").exists()


def test_library_imports_nothing_of_the_programs():
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] not in ("infer", "train"), f"{path}: imports {name}"
