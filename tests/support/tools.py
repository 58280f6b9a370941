"""The scripts of docs/tools as modules."""

import importlib.util
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def load(name):
    """The module; tools import each other by name."""
    if str(DOCS / "tools") not in sys.path:
        sys.path.append(str(DOCS / "tools"))
    spec = importlib.util.spec_from_file_location(name, DOCS / "tools" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
