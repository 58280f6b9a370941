"""The methods that a server's models can run, for clients that offer a choice."""

from __future__ import annotations

from typing import Any

from infer.serve.admission import Admission
from specjax._util.errors import SpecjaxError
from specjax.registry import METHODS, Context, MethodSpec


def method_list(admission: Admission) -> list[dict[str, Any]]:
    """Every method that requests may name: what it does, what it needs, and its options.

    A method that the loaded models cannot run has the reason as ``refused``, else None.
    """
    allowed = admission.methods
    names = METHODS if allowed is None else {admission.method, *allowed}
    return [_described(spec, admission) for name, spec in METHODS.items() if name in names]


def _described(spec: MethodSpec, admission: Admission) -> dict[str, Any]:
    options = [
        {"name": name, "default": _text(option.default), "help": option.help}
        for name, option in spec.options.items()
    ]
    return {
        "name": spec.name,
        "summary": spec.summary,
        "needs": spec.needs,
        "lossless": spec.lossless,
        "options": options,
        "refused": _refused(spec, admission),
    }


def _refused(spec: MethodSpec, admission: Admission) -> str | None:
    if spec.needs_reward:
        return f"method {spec.name} needs a reward, and this server has none"
    try:
        spec.build(Context(admission.target, admission.draft), {})
    except SpecjaxError as error:
        return str(error)
    return None


def _text(value: Any) -> str:
    """A default as requests write it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
