"""specjax: speculative decoding for JAX. A method is a drafter, a target distribution and an
acceptance rule, joined into one step; one loop runs them all.

Names are imported when they are first used: ``import specjax`` alone loads no JAX.
"""

# ruff: noqa: F401 - the imports below are for editors and type checkers
from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax import draft, probs, rewards, verify
    from specjax.errors import InputError, ModelError, OptionError, PairError, SpecjaxError
    from specjax.generate import generate, stream
    from specjax.lm import LM, from_params, load, on_mesh
    from specjax.mesh import make_mesh
    from specjax.methods import compose, method, methods
    from specjax.net import Net
    from specjax.output import Generation, Piece
    from specjax.protocols import Drafter, Method, Rule, TargetDist, rule
    from specjax.rounds import DraftVerify, draft_verify
    from specjax.target import Contrastive, Warped
    from specjax.types import DecodeState, Draft, Inputs, Stats, TreeShape, Verdict
    from specjax.warp import Sampling

__version__ = "0.1.0"

_HOMES = {
    "errors": "InputError ModelError OptionError PairError SpecjaxError",
    "generate": "generate stream",
    "lm": "LM from_params load on_mesh",
    "mesh": "make_mesh",
    "methods": "compose method methods",
    "net": "Net",
    "output": "Generation Piece",
    "protocols": "Drafter Method Rule TargetDist rule",
    "rounds": "DraftVerify draft_verify",
    "target": "Contrastive Warped",
    "types": "DecodeState Draft Inputs Stats TreeShape Verdict",
    "warp": "Sampling",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [*_HOME_OF, "draft", "probs", "rewards", "verify"]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(f"specjax.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"specjax.{name}"):
        return importlib.import_module(f"specjax.{name}")
    raise AttributeError(f"module 'specjax' has no attribute {name!r}")


class _Package(ModuleType):
    """Keeps ``specjax.generate`` and ``specjax.methods`` functions.

    Importing a submodule binds it in its package, over a function of the same name.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in _HOME_OF):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
