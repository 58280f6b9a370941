"""Methods: options, parts, the table, and what turns names or objects into one of them."""

from specjax.registry.options import AUTO, Option
from specjax.registry.parts import DRAFTERS, RULES, SEARCHES, TARGET_DISTS, Context, presets
from specjax.registry.resolve import bind, choose
from specjax.registry.table import METHODS, MethodSpec, compose, method, methods, usual_rule

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
