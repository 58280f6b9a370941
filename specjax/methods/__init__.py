"""Methods: options, parts, the table, and what turns names or objects into one of them."""

from specjax.methods.options import AUTO, Option
from specjax.methods.parts import DRAFTERS, RULES, SEARCHES, TARGET_DISTS, Context, presets
from specjax.methods.resolve import bind, choose
from specjax.methods.table import METHODS, MethodSpec, compose, method, methods, usual_rule

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
