"""Functions that the demo models have never seen, read from the running interpreter's library.

The manifest `heldout.json` only names them, with a hash of their text, so that no source is
copied here. Sources are parsed, never executed.
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


@dataclass(frozen=True)
class HeldOut:
    """One function to complete.

    Attributes:
      module: dotted name of the module it lives in.
      name: qualified name inside the module, as in `JSONDecoder.decode`.
      source: the function as written, decorators and indentation included.
      prompt: the lines before it, its signature and docstring; no line break at the end, since
        a line break and the next line's indentation are one token.
      reference: what follows the prompt, up to the function's last line.
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
        """Hash of `source`, by which another Python version's text is told apart."""
        return hashlib.sha256(self.source.encode()).hexdigest()


def held_out_functions(
    limit: int | None = None, *, manifest: Path = MANIFEST, root: Path | None = None
) -> tuple[list[HeldOut], list[str]]:
    """The functions of the manifest as this interpreter has them, in the manifest's order.

    The order goes round the modules, so that the first few are varied.

    Args:
      limit: at most so many; all when None.
      manifest: the JSON file to read.
      root: folder of the standard library; the running interpreter's when None.

    Returns:
      (functions, warnings): a function whose text has changed since the manifest was made is
      kept, one that is gone is left out, and one line says how many of each there are.
    """
    listed = json.loads(manifest.read_text(encoding="utf-8"))
    root = root or Path(sysconfig.get_path("stdlib"))
    functions_of = cache(lambda module: _functions_of(root, module))
    functions: list[HeldOut] = []
    changed = missing = 0
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

    Functions inside functions are parts of the outer one.
    """
    lines = text.split("\n")
    for name, node in _walk(ast.parse(text), ""):
        first = _first_line(node)
        head = _head_end(node, lines)
        if head is not None:
            prompt = lines[max(0, first - 1 - CONTEXT_LINES) : head]
            yield HeldOut(
                module=module,
                name=name,
                source="\n".join(lines[first - 1 : node.end_lineno]),
                prompt=_last_lines(prompt, PROMPT_CHARS),
                reference="\n" + "\n".join(lines[head : node.end_lineno]),
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


def _walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """(qualified name, node) of the functions below `node`, also those under `if` and `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _walk(child, f"{prefix}{child.name}.")
        else:
            yield from _walk(child, prefix)


def _first_line(node: ast.stmt) -> int:
    """Line of the statement from 1; a decorator counts, for `lineno` leaves it out."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def _head_end(node: ast.FunctionDef, lines: list[str]) -> int | None:
    """Last line of signature and docstring, from 1; None where no line of the body follows."""
    if ast.get_docstring(node, clean=False) is not None:
        end = node.body[0].end_lineno
        return end if len(node.body) > 1 and _first_line(node.body[1]) > end else None
    end = _first_line(node.body[0]) - 1
    # Comments between the signature and the first statement belong to the body.
    while end > node.lineno and (lines[end - 1].strip() or "#").startswith("#"):
        end -= 1
    return end if end >= node.lineno else None


def _last_lines(lines: list[str], limit: int) -> str:
    """The last whole lines that fit in `limit` characters, at least one, none blank in front."""
    start, size = len(lines) - 1, len(lines[-1])
    while start > 0 and size + 1 + len(lines[start - 1]) <= limit:
        start -= 1
        size += 1 + len(lines[start])
    return "\n".join(lines[start:]).lstrip("\n")


def _warnings(version: str, total: int, changed: int, missing: int) -> list[str]:
    if not changed and not missing:
        return []
    return [
        f"{changed} of {total} held-out functions read differently in Python "
        f"{platform.python_version()} than in {version}, on which the demo models were trained, "
        f"and {missing} are missing and left out"
    ]
