"""The docs site: it builds without a warning, its links lead somewhere, and every name is in it."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import specjax

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
    (reference,) = (text for path, text in site.items() if path.endswith("/reference.html"))
    places = re.findall(r'id="(specjax\.[\w.]+)"', reference)
    names = {place.rpartition(".")[2] for place in places}
    assert names >= {name for name in dir(specjax) if not name.startswith("_")}


def test_every_public_name_has_a_docstring():
    public = [getattr(specjax, name) for name in specjax.__all__ if not name.startswith("_")]
    assert not [thing for thing in public if not (thing.__doc__ or "").strip()]
