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
# Modules whose public names have a page of their own in the reference.
MODULES = ("draft", "verify", "rewards", "laws", "metrics", "models")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
DIAGRAM = re.compile(r"```mermaid\n.*?```\n", re.DOTALL)
NODE = re.compile(r'(\w+)\["([^"]+)"\]')
ARROW = re.compile(r"^ *(\w+)(?:\[[^\]]*\])? --> (.+)$", re.MULTILINE)
INLINE_CODE = re.compile(r"<code>[^<]*</code>")
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages above docs/ and the reference."""
    for source, page in ABOVE.items():
        text = with_links((ROOT / source).read_text(encoding="utf-8"), source)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "reference.md", content=reference()))
    for module in MODULES:
        page = f"reference/{module}.md"
        files.append(File.generated(config, page, content=reference_of(module)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Changes the links of a page of docs/, which are links between files of the checkout."""
    source = page.file.src_uri
    if source in ABOVE.values() or source.startswith("reference"):
        return markdown
    return with_links(DIAGRAM.sub(as_list, markdown), f"docs/{source}")


def on_page_content(html: str, **_: Any) -> str:
    """Keeps an option of a command line whole, which browsers break after its hyphens."""
    return INLINE_CODE.sub(
        lambda code: OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html
    )


def as_list(diagram: re.Match) -> str:
    """A diagram as the list of its packages and what each imports.

    Drawing it in a browser would take a library of three megabytes.
    """
    lines = []
    labels = {name: text.split("<br/>")[0] for name, text in NODE.findall(diagram[0])}
    for name, targets in ARROW.findall(diagram[0]):
        others = ", ".join(f"`{labels.get(goal, goal)}`" for goal in targets.split(" & "))
        lines.append(f"- `{labels.get(name, name)}` imports {others}")
    return "\n".join(lines) + "\n"


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
            # A reader imports errors from `specjax`, not from the private package of theirs.
            title = "specjax" if module.startswith("_") else f"specjax.{module}"
            lines += ["", f"## {title}"] + [f"\n::: {name}" for name in names]
    lines += ["", "## Modules"]
    for name in modules[""]:
        lines += [f"\n::: specjax.{name}", "    options: {members: false}"]
        if name in MODULES:
            lines += ["", f"Its names: [specjax.{name}](reference/{name}.md)."]
    return "\n".join(lines) + "\n"


def reference_of(module: str) -> str:
    """The page of the public names of ``specjax.MODULE``."""
    lines = [f"# specjax.{module}", "", f"::: specjax.{module}"]
    folder = ROOT / "specjax" / module
    if not folder.is_dir():
        return "\n".join([*lines, "    options: {show_root_heading: false}", ""])
    lines += ["    options: {show_root_heading: false, members: false}"]
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    (public,) = (ast.literal_eval(node.value) for node in tree.body if is_all(node))
    lines += [f"\n::: specjax.{module}.{name}" for name in public]
    return "\n".join(lines) + "\n"


def is_all(node: ast.stmt) -> bool:
    """Whether a statement sets ``__all__``."""
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
