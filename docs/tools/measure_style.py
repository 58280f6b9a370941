"""How code and pages read, in numbers: python docs/tools/measure_style.py [PATH ...]

For code it counts syntax nodes a line, full-line comments, parallel assignments (``a, b = x, y``),
conditional expressions, nested ones, and functions over 50 lines. For prose it counts words and
commas a sentence, and the share of sentences over 40 words. Markdown files and docstrings are
counted separately, without code blocks, tables, headings and lists of arguments. ``--list`` names
every place that counts against a limit.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("specjax", "infer", "train")
PROSE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs")
LONG_FUNCTION = 50  # lines
LONG_SENTENCE = 40  # words


@dataclasses.dataclass
class CodeCounts:
    """Counts over one or several Python files."""

    lines: int = 0  # neither blank nor a comment
    comments: int = 0  # lines that are a comment alone
    nodes: int = 0
    assignments: int = 0
    functions: int = 0
    parallel: list[str] = dataclasses.field(default_factory=list)
    conditionals: list[str] = dataclasses.field(default_factory=list)
    nested: list[str] = dataclasses.field(default_factory=list)
    long: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: CodeCounts) -> None:
        for field in dataclasses.fields(self):
            both = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, both)


def count_code(path: Path) -> CodeCounts:
    """The counts of one Python file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    counts = CodeCounts()
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            counts.comments += 1
        elif stripped:
            counts.lines += 1
    for node in ast.walk(tree):
        counts.nodes += 1
        place = f"{_relative(path)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Assign):
            counts.assignments += 1
            if _is_parallel(node):
                counts.parallel.append(place)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            counts.assignments += 1
        elif isinstance(node, ast.IfExp):
            counts.conditionals.append(place)
            if any(isinstance(child, ast.IfExp) for child in _below(node)):
                counts.nested.append(place)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            counts.functions += 1
            length = node.end_lineno - node.lineno + 1
            if length > LONG_FUNCTION:
                counts.long.append(f"{place} {node.name} ({length} lines)")
    return counts


def _is_parallel(node: ast.Assign) -> bool:
    """Whether it is ``a, b = x, y``: several values, each to a name of its own."""
    if not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets)


def _below(node: ast.AST) -> Iterator[ast.AST]:
    """Everything below a node, except what lies in functions of their own."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Lambda):
            continue
        yield child
        yield from _below(child)


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a Python file, without their lists of arguments and errors."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield re.split(r"\n\s*(?:Args|Raises|Attributes|Returns|Yields):\n", text)[0]


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text in Markdown or of a docstring."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        lines = [line for line in block.splitlines() if not _is_no_prose(line)]
        flat = " ".join(" ".join(lines).split())
        flat = re.sub(r"``?[^`]*``?", "code", flat)
        flat = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", flat)
        flat = re.sub(r"\b(e\.g|i\.e|et al|cf|vs|Eq|Fig|Sec|No)\.", r"\1", flat)
        for sentence in re.split(r"(?<=[.!?:;])\s+(?=[\"“(]?[A-Zα-ω0-9*_`])|(?<=[.!?])\s+", flat):
            if len(sentence.split()) > 2:
                yield sentence


def _is_no_prose(line: str) -> bool:
    stripped = line.strip()
    return stripped.startswith(("|", "#", "<", "![", ">>>", "    "))


def prose_numbers(texts: Iterable[str]) -> dict[str, float]:
    """Words and commas a sentence, and the share of long ones."""
    found = [sentence for text in texts for sentence in sentences(text)]
    words = [len(sentence.split()) for sentence in found]
    number = max(1, len(found))
    return {
        "sentences": len(found),
        "words a sentence": sum(words) / number,
        "commas a sentence": sum(sentence.count(",") for sentence in found) / number,
        "over 40 words": sum(count > LONG_SENTENCE for count in words) / number,
    }


def tracked(paths: Iterable[str], ending: str) -> list[Path]:
    """The files of the repository below these paths, new ones too."""
    command = ["git", "ls-files", "-co", "--exclude-standard", *paths]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in names.splitlines() if name.endswith(ending)]
    return [path for path in files if path.exists()]


def _relative(path: Path) -> str:
    return str(path.resolve().relative_to(ROOT))


def code_numbers(counts: CodeCounts) -> dict[str, float]:
    """The numbers that have limits, from the counts."""
    return {
        "lines": counts.lines,
        "nodes a line": counts.nodes / counts.lines,
        "comments per 100 lines": 100 * counts.comments / counts.lines,
        "parallel assignments": len(counts.parallel) / max(1, counts.assignments),
        "conditionals per 1000 lines": 1000 * len(counts.conditionals) / counts.lines,
        "nested conditionals": len(counts.nested),
        "functions": counts.functions,
        "functions over 50 lines": len(counts.long),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", help="files or folders (default: all)")
    parser.add_argument("--list", action="store_true", help="name the places that count")
    args = parser.parse_args()
    counts = CodeCounts()
    files = tracked(args.paths or CODE, ".py")
    for path in files:
        counts.add(count_code(path))
    if files:
        print("code:", *(f"{name} {value:.3g}" for name, value in code_numbers(counts).items()))
        if args.list:
            print(*counts.parallel, *counts.nested, *counts.long, sep="\n")
        texts = (text for path in files for text in docstrings(path))
        print("docstrings:", *(f"{n} {v:.3g}" for n, v in prose_numbers(texts).items()))
    pages = tracked(args.paths or PROSE, ".md")
    if pages:
        texts = [path.read_text(encoding="utf-8") for path in pages]
        print("pages:", *(f"{n} {v:.3g}" for n, v in prose_numbers(texts).items()))
        if args.list:
            long = [s for t in texts for s in sentences(t) if len(s.split()) > LONG_SENTENCE]
            print(*long, sep="\n")


if __name__ == "__main__":
    main()
