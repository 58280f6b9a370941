"""Hooks of mkdocs.yml: pages of files above docs/, and the reference of the public names.

Nothing that is made here is written to the checkout.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
# Pages of the site that lie above docs/, by their names there.
ABOVE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "SECURITY.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages above docs/ and the reference."""
    for source, page in ABOVE.items():
        text = with_links((ROOT / source).read_text(encoding="utf-8"), source)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "reference.md", content=reference()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Changes the links of a page of docs/, which are links between files of the checkout."""
    if page.file.src_uri in (*ABOVE.values(), "reference.md"):
        return markdown
    return with_links(markdown, f"docs/{page.file.src_uri}")


def with_links(text: str, source: str) -> str:
    """``text`` with links between pages of the site; a link to another file is its text alone.

    Args:
      source: the file of ``text``, relative to the checkout.
    """
    here = posixpath.dirname(source)
    start = posixpath.dirname(place(source) or "")

    def replaced(match: re.Match) -> str:
        image, label, target, anchor = match.groups()
        if not target or "://" in target:
            return match[0]
        goal = place(posixpath.normpath(posixpath.join(here, target)))
        if goal is None:
            return label
        return f"{image}[{label}]({posixpath.relpath(goal, start or '.')}{anchor or ''})"

    return LINK.sub(replaced, text)


def place(path: str) -> str | None:
    """Where the site has a file of the checkout; None if it has none."""
    if path in ABOVE:
        return ABOVE[path]
    inside = path.removeprefix("docs/")
    is_page = inside != path and not inside.startswith("tools/") and (ROOT / path).is_file()
    return inside if is_page else None


def reference() -> str:
    """The page of all public names of ``specjax``, in the groups of their modules."""
    modules: dict[str, list[str]] = {}
    stub = ast.parse((ROOT / "specjax" / "__init__.pyi").read_text(encoding="utf-8"))
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                # `from . import laws` is a module, `from .lm import load` is a name in one.
                name = f"specjax.{node.module}.{alias.name}" if node.module else alias.name
                modules.setdefault(node.module or "", []).append(name)
    lines = ["# Reference", "", "The public names of `import specjax as sj`."]
    for module, names in modules.items():
        if module:
            lines += ["", f"## specjax.{module}"] + [f"\n::: {name}" for name in names]
    lines += ["", "## Modules"]
    for name in modules[""]:
        lines += [f"\n::: specjax.{name}", "    options: {members: false}"]
    return "\n".join(lines) + "\n"
