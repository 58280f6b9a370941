"""Held-out functions: read from the standard library, never trained on, changes reported."""

import ast
import json
import platform
import subprocess
import sys
import textwrap
from collections import Counter

import pytest

from specjax.demo.heldout import MANIFEST, PROMPT_CHARS, held_out_functions, parse_functions
from train.data.corpus import Document, is_held_out, stdlib_root
from train.demo.heldout import build_manifest, write_manifest

SOURCE = '''\
import os


class A:
    """A class."""

    @property
    # why
    def size(self, x=(1, 2),
             y=3):  # odd
        """Doc of
        size."""
        # A comment of the body.
        return x

    def no_doc(self):

        # first
        @staticmethod
        def inner():
            pass
        return inner

if os.name:
    def one_line(): return 1
    async def only_doc():
        """Nothing else."""
'''


@pytest.fixture
def library(tmp_path):
    """A library of one file, and a manifest that lists its functions."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text(SOURCE)
    entries = [
        {"module": "pkg", "name": f.name, "sha256": f.sha256}
        for f in parse_functions(SOURCE, "pkg")
    ]
    manifest = tmp_path / "heldout.json"
    write_manifest({"python": "3.0.1", "functions": entries}, manifest)
    return manifest, tmp_path


def test_prompt_and_reference_by_hand():
    size, no_doc = parse_functions(SOURCE, "pkg")
    assert (size.id, no_doc.id) == ("pkg:A.size", "pkg:A.no_doc")
    assert size.prompt.startswith("import os\n") and size.prompt.endswith('        size."""')
    assert size.reference == "\n        # A comment of the body.\n        return x"
    assert size.source.startswith("    @property\n    # why\n    def size")
    assert no_doc.prompt.endswith("\n    def no_doc(self):")
    assert no_doc.reference.startswith("\n\n        # first\n        @staticmethod\n")
    for function in (size, no_doc):
        assert (function.prompt + function.reference).endswith(function.source)
        assert SOURCE.count(function.prompt + function.reference) == 1


def test_a_long_prompt_loses_its_front_at_a_line_boundary():
    lines = [f"CONSTANT_{i} = {'x' * 90!r}" for i in range(30)]
    source = "\n".join([*lines, "def f():", "    pass"])
    (function,) = parse_functions(source, "m")
    assert PROMPT_CHARS - 110 < len(function.prompt) <= PROMPT_CHARS
    assert function.prompt.split("\n") == [*lines, "def f():"][-function.prompt.count("\n") - 1 :]


def test_the_committed_manifest_reads():
    functions, warnings = held_out_functions()
    listed = json.loads(MANIFEST.read_text())
    assert len(listed["functions"]) >= 260
    if platform.python_version() == listed["python"]:
        assert len(functions) == len(listed["functions"]) and warnings == []
    assert len(functions) >= 200
    for function in functions:
        assert len(function.prompt) <= PROMPT_CHARS and not function.prompt.endswith("\n")
        assert function.reference.startswith("\n") and not function.reference.endswith("\n")
        ast.parse(textwrap.dedent(function.source))
    # The list goes round over the modules, so no module dominates the first 40.
    assert max(Counter(f.module for f in functions[:40]).values()) <= 2


def test_every_listed_function_lives_in_a_held_out_file():
    for module in {f.module for f in held_out_functions()[0]}:
        path = module.replace(".", "/")
        is_package = (stdlib_root() / path / "__init__.py").exists()
        assert is_held_out(f"stdlib/{path}/__init__.py" if is_package else f"stdlib/{path}.py")


def test_limit(library):
    manifest, root = library
    functions, warnings = held_out_functions(1, manifest=manifest, root=root)
    assert [f.name for f in functions] == ["A.size"] and warnings == []
    assert held_out_functions(0, manifest=manifest, root=root) == ([], [])


def test_changed_and_missing_functions_are_named(library):
    manifest, root = library
    listed = json.loads(manifest.read_text())
    listed["functions"].append({"module": "gone", "name": "f", "sha256": "0"})
    manifest.write_text(json.dumps(listed))
    (root / "pkg" / "__init__.py").write_text(SOURCE.replace("return x", "return y"))
    functions, warnings = held_out_functions(manifest=manifest, root=root)
    assert [f.name for f in functions] == ["A.size", "A.no_doc"]
    assert warnings == [
        f"1 of 3 held-out functions read differently in Python {platform.python_version()} than "
        "in 3.0.1, on which the demo models were trained, and 1 are missing and left out"
    ]


def test_the_manifest_lists_only_unseen_functions_of_good_length():
    def held_out_name(folder):
        return next(n for i in range(1000) if is_held_out(n := f"{folder}/m{i}.py"))

    def function(name, lines):
        return f"def {name}():\n" + "".join(f"    {name}_{i} = {i}\n" for i in range(lines))

    bodies = {"short": 5, "fits": 6, "copied": 10, "twice": 7, "long": 61}
    text = "".join(function(*item) for item in bodies.items()) + function("twice", 8)
    seen = Document("d/0.py", "class C:\n" + textwrap.indent(function("copied", 10), "    "))
    assert not is_held_out(seen.name)
    # Only the standard library is on every machine, so files of other sources are not listed.
    documents = [Document(held_out_name(folder), text) for folder in ("stdlib", "other")]
    manifest = build_manifest([*documents, seen])
    assert [entry["name"] for entry in manifest["functions"]] == ["fits"]
    assert manifest["python"] == platform.python_version()


def test_the_library_side_imports_no_program_and_runs_no_module():
    code = (
        "import sys, specjax.demo.heldout as h; h.held_out_functions()\n"
        "assert not {'train', 'infer', 'mailcap', 'imghdr'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
