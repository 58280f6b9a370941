"""The notebooks and the one-function example run, from top to bottom."""

import ast
import importlib
import re
import sys
import tomllib
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

import specjax as sj
from support.real_models import installed_file

EXAMPLES = Path(__file__).parents[2] / "examples"


NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_installs_first(path):
    """Its first cell of code installs what is missing, so it runs on Colab as well."""
    notebook = nbformat.read(path, as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert 'install("specjax", "specjax")' in first.source
    text = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert "GPU" in text and "TPU" in text and "Colab" in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_installs_what_it_imports(path):
    """Every package is Python's, ours, one that specjax needs, or in a call of ``install``."""
    notebook = nbformat.read(path, as_version=4)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    imported = {name.partition(".")[0] for name in imports_of(ast.parse(code))}
    project = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]
    needed = {re.split("[^a-z_]", line)[0] for line in project["dependencies"]}
    installed = set(re.findall(r'^install\("(\w+)"', code, re.M))
    assert imported <= {*sys.stdlib_module_names, "specjax", "infer", "train", *needed, *installed}


def imports_of(tree):
    """The modules that the code imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if path.stem != "sdsat"], ids=lambda path: path.stem
)
def test_notebook_runs(path):
    if path.stem == "smollm2":
        installed_file("smollm2")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": EXAMPLES}}).execute()


@pytest.mark.slow
def test_the_sdsat_notebook_runs_as_plain_python(monkeypatch):
    """Its cells run in order without Jupyter, and give the results that its text states."""
    monkeypatch.chdir(EXAMPLES)
    notebook = nbformat.read(EXAMPLES / "sdsat.ipynb", as_version=4)
    names: dict = {"__name__": "notebook"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, cell.id, "exec"), names)
    acceptance, found = names["acceptance"], names["found"]
    assert len(acceptance) == 3 and acceptance == sorted(acceptance, reverse=True)
    assert acceptance[0] > 0
    calls = {method: int(out.stats["target_calls"].sum()) for method, out in found.items()}
    assert calls["sdsat-single"] <= calls["sdsat"]


def test_the_one_function_writes_what_generate_writes(monkeypatch):
    """Both give the same tokens in as many target passes, greedy and sampled."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("speculative_in_one_function")
    target, draft = sj.load("demo"), sj.load("demo-draft")
    texts = ["def fibonacci(n):\n", "import os\n", "class Stack:\n    def push(self, item):\n"]
    prompts = [target.tokenizer.encode(text) for text in texts]
    for sampling in (sj.Sampling(), sj.Sampling(temperature=0.8, top_p=0.9)):
        new, rounds = example.decode(target, draft, prompts, sampling, seed=3, new_tokens=40)
        out = sj.generate(
            target, prompts, draft=draft, sampling=sampling, seed=3, max_new_tokens=40
        )
        for tokens, wanted in zip(new, out.tokens, strict=True):
            np.testing.assert_array_equal(tokens, wanted)
        np.testing.assert_array_equal(rounds, out.stats["target_calls"])
        assert out.stats["accepted"].sum() > 0
