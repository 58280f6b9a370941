"""The registry: every method and part by name, their options, and how a method is built of them."""

from specjax.registry.drafters import DRAFTERS
from specjax.registry.method_spec import MethodSpec
from specjax.registry.options import AUTO, Option
from specjax.registry.parts import Context
from specjax.registry.resolve import bind, choose
from specjax.registry.rules import RULES
from specjax.registry.searches import SEARCHES
from specjax.registry.table import METHODS, compose, method, methods, presets, usual_rule
from specjax.registry.targets import TARGET_DISTS

__all__ = [
    "AUTO",
    "DRAFTERS",
    "METHODS",
    "RULES",
    "SEARCHES",
    "TARGET_DISTS",
    "Context",
    "MethodSpec",
    "Option",
    "bind",
    "choose",
    "compose",
    "method",
    "methods",
    "presets",
    "usual_rule",
]
