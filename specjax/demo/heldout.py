"""Functions that the demo models were not trained on, from Python's standard library.

The manifest `heldout.json` has only their names and a hash of their source. The source itself is
read from the running interpreter's library, so that none is copied here. It is parsed, never
executed.
"""

import ast
import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MANIFEST = Path(__file__).with_name("heldout.json")
CONTEXT_LINES = 20  # lines of the file that a prompt shows before the function
PROMPT_CHARS = 1200

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class HeldOut:
    """One function to complete.

    Attributes:
      module: dotted name of the module it lives in.
      name: qualified name inside the module, as in `JSONDecoder.decode`.
      source: the function as written, with decorators and indentation.
      prompt: some lines before it, then its signature and docstring. There is no line break at the
        end, because a line break and the next line's indentation are one token.
      reference: the rest of the function.
    """

    module: str
    name: str
    source: str
    prompt: str
    reference: str

    @property
    def id(self) -> str:
        return f"{self.module}:{self.name}"

    @property
    def sha256(self) -> str:
        """Hash of `source`, as hex digits. It differs if a Python version has another text."""
        return hashlib.sha256(self.source.encode()).hexdigest()


def held_out_functions(
    limit: int | None = None, *, manifest: Path = MANIFEST, root: Path | None = None
) -> tuple[list[HeldOut], list[str]]:
    """The functions of the manifest, as this interpreter has them, in the manifest's order.

    The manifest takes one function of each module in turn, so that the first few are varied.

    Args:
      limit: the number of functions at most; None: all.
      manifest: the JSON file to read.
      root: folder of the standard library; None: the running interpreter's.

    Returns:
      (functions, warnings): functions whose text has changed since the manifest was made are
      kept. Missing ones are left out. One line of warnings says how many of each there are.
    """
    listed = json.loads(manifest.read_text(encoding="utf-8"))
    root = root or Path(sysconfig.get_path("stdlib"))
    functions_of = cache(lambda module: _functions_of(root, module))
    functions: list[HeldOut] = []
    changed = 0
    missing = 0
    for entry in listed["functions"]:
        if limit is not None and len(functions) >= limit:
            break
        function = functions_of(entry["module"]).get(entry["name"])
        if function is None:
            missing += 1
        else:
            changed += function.sha256 != entry["sha256"]
            functions.append(function)
    return functions, _warnings(listed["python"], len(functions) + missing, changed, missing)


def parse_functions(text: str, module: str) -> Iterator[HeldOut]:
    """Every function and method of a source file that has a body on lines of its own.

    A function inside a function is a part of the outer one.

    Raises:
      SyntaxError: the text is no Python source.
    """
    lines = text.split("\n")
    for name, node in _walk(ast.parse(text), ""):
        first = _first_line(node)
        prompt_end = _prompt_end(node, lines)
        if prompt_end is None:
            continue
        # Line numbers count from 1, so line n is lines[n - 1].
        prompt = lines[max(0, first - 1 - CONTEXT_LINES) : prompt_end]
        yield HeldOut(
            module=module,
            name=name,
            source="\n".join(lines[first - 1 : node.end_lineno]),
            prompt=_last_lines(prompt, PROMPT_CHARS),
            reference="\n" + "\n".join(lines[prompt_end : node.end_lineno]),
        )


def _functions_of(root: Path, module: str) -> dict[str, HeldOut]:
    """The module's functions by qualified name; empty where its source cannot be read."""
    stem = root.joinpath(*module.split("."))
    for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
        try:
            text = path.read_text(encoding="utf-8-sig")
            return {function.name: function for function in parse_functions(text, module)}
        except (OSError, SyntaxError, ValueError):
            continue
    return {}


def _walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    """(qualified name, node) of the functions below `node`, including those in `if` and `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _walk(child, f"{prefix}{child.name}.")
        else:
            yield from _walk(child, prefix)


def _first_line(node: ast.stmt) -> int:
    """The statement's first line, from 1, decorators included: `lineno` leaves them out."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _prompt_end(node: Function, lines: list[str]) -> int | None:
    """Last line of signature and docstring, from 1; None where the body has no lines after it."""
    if ast.get_docstring(node, clean=False) is not None:
        end = node.body[0].end_lineno
        assert end is not None, "parsed nodes have line numbers"
        has_body = len(node.body) > 1 and _first_line(node.body[1]) > end
        return end if has_body else None

    end = _first_line(node.body[0]) - 1
    # Comments and blank lines between the signature and the first statement belong to the body.
    while end > node.lineno:
        line = lines[end - 1].strip()
        if line and not line.startswith("#"):
            break
        end -= 1
    return end if end >= node.lineno else None


def _last_lines(lines: list[str], limit: int) -> str:
    """The last whole lines that fit in `limit` characters; at least one, and no blank one first."""
    start = len(lines) - 1
    size = len(lines[-1])
    while start > 0 and size + 1 + len(lines[start - 1]) <= limit:
        start -= 1
        size += 1 + len(lines[start])
    return "\n".join(lines[start:]).lstrip("\n")


def _warnings(version: str, total: int, changed: int, missing: int) -> list[str]:
    """One line about changed and missing functions, if there are any."""
    if not changed and not missing:
        return []
    return [
        f"{changed} of {total} held-out functions read differently in Python "
        f"{platform.python_version()} than in {version}, on which the demo models were trained, "
        f"and {missing} are missing and left out"
    ]
