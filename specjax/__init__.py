"""specjax: speculative decoding for JAX. A method is a drafter, a target distribution and an
acceptance rule, joined into one step; one loop runs them all.

Names are imported when they are first used: ``import specjax`` alone loads no JAX. The stub beside
this file, which editors and type checkers read, says where each one lives.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOME_OF = {name: home for home, name in re.findall(r"from (\S+) import (\w+)", _STUB)}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if _is_function_or_class(name):
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"specjax.{name}"):
        return importlib.import_module(f"specjax.{name}")
    raise AttributeError(f"module 'specjax' has no attribute {name!r}")


def _is_function_or_class(name: str) -> bool:
    return _HOME_OF.get(name, __name__) != __name__


class _Package(ModuleType):
    """Keeps ``specjax.generate`` and ``specjax.methods`` functions.

    Importing a submodule binds it in its package, over a function of the same name.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and _is_function_or_class(name)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
