"""The package as installed: version and typing marker."""

import importlib.metadata
from pathlib import Path

import specjax

ROOT = Path(specjax.__file__).parent


def test_version_matches_the_distribution():
    assert importlib.metadata.version("specjax") == specjax.__version__


def test_the_citation_has_the_version():
    text = (ROOT.parent / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {specjax.__version__}\n" in text


def test_library_is_typed():
    assert (ROOT / "py.typed").exists()
