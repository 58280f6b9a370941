"""The docs site: it builds without a warning, its links lead somewhere, and every name is in it."""

import html
import inspect
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import specjax
from support.tools import load

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[str, str]:
    """The text of every page of the site by its path."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {str(path): path.read_text(encoding="utf-8") for path in folder.rglob("*.html")}
    # A server may show this one at any address, so its links are absolute.
    del pages[str(folder / "404.html")]
    return pages


@pytest.mark.slow
def test_every_link_leads_to_a_page_and_to_a_place_in_it(site):
    lost = []
    for path, text in site.items():
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            target, _, anchor = html.unescape(link).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            goal = os.path.normpath(Path(path).parent / target) if target else path
            has_place = not anchor or f'id="{anchor}"' in site.get(goal, "")
            if not (os.path.exists(goal) and has_place):
                lost.append((path, link))
    assert not lost


@pytest.mark.slow
def test_no_page_fetches_anything_from_elsewhere(site):
    fetched = r"<(?:script|img|link|iframe)\b[^>]+(?:src|href)=\"?(?:https?:)?//[^>]+>"
    for path, text in site.items():
        assert not re.findall(fetched, text), path
        # The theme's script would fetch a library to draw these.
        assert 'class="mermaid"' not in text, path


@pytest.mark.slow
def test_the_reference_has_every_public_name(site):
    assert names_of(site, "/reference.html") >= {n for n in dir(specjax) if not n.startswith("_")}
    for module in load("site_pages").MODULES:
        public = getattr(specjax, module).__dict__.get("__all__", ())
        assert names_of(site, f"/reference/{module}.html") >= set(public), module


@pytest.mark.slow
def test_nothing_of_a_source_stands_in_a_page(site):
    """Neither a docstring's marks nor the text of a diagram."""
    for path, text in site.items():
        assert not re.findall(r":(?:class|func|meth|mod|data):|flowchart", text), path


def names_of(site: dict[str, str], end: str) -> set[str]:
    """The public names that one page of the reference describes."""
    (reference,) = (text for path, text in site.items() if path.endswith(end))
    return {place.rpartition(".")[2] for place in re.findall(r'id="(specjax\.[\w.]+)"', reference)}


# --- docstrings -------------------------------------------------------------------------------


def test_every_public_name_has_a_docstring():
    undocumented = []
    for name in specjax.__all__:
        undocumented += without_docstring(f"specjax.{name}", getattr(specjax, name))
    assert not undocumented


def test_a_name_without_a_docstring_is_found():
    class Bare:
        """A class with a method that says nothing."""

        def says_nothing(self): ...

    assert without_docstring("Bare", Bare) == ["Bare.says_nothing"]


def without_docstring(path: str, thing: object) -> list[str]:
    """Which of a name, its public names and its methods have no docstring."""
    if not (inspect.ismodule(thing) or inspect.isclass(thing) or inspect.isfunction(thing)):
        return []
    missing = [] if (thing.__doc__ or "").strip() else [path]
    if inspect.ismodule(thing):
        for name in public_names(thing):
            missing += without_docstring(f"{path}.{name}", getattr(thing, name))
    elif inspect.isclass(thing):
        methods = [name for name, member in vars(thing).items() if is_method(name, member)]
        missing += [f"{path}.{name}" for name in methods if not inherited_docstring(thing, name)]
    return missing


def public_names(module: types.ModuleType) -> list[str]:
    """The names of ``__all__``, else those that the module defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    mine = [n for n, it in vars(module).items() if getattr(it, "__module__", "") == module.__name__]
    return [name for name in mine if not name.startswith("_")]


def is_method(name: str, member: object) -> bool:
    """Whether a member of a class is a public method or property that is written out."""
    function = function_of(member)
    return not name.startswith("_") and isinstance(function, types.FunctionType)


def inherited_docstring(cls: type, name: str) -> str:
    """The docstring of a method or property, or of the one that it replaces."""
    members = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
    docs = [function_of(member).__doc__ for member in members if is_method(name, member)]
    return next((doc for doc in docs if doc), "")


def function_of(member: object) -> object:
    """The function behind a property, a cached property, or a class or static method."""
    if isinstance(member, property):
        return member.fget
    return getattr(member, "func", getattr(member, "__func__", member))
