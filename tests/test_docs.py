"""Pages that are written from the code are current."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_methods_page_is_current():
    found = importlib.util.spec_from_file_location("make_methods", DOCS / "make_methods.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.make_page()
