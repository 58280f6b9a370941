"""What is measured: every chosen method with its options, under each sampling, in each size."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import specjax as sj
from infer.bench.commands import DEFAULT
from specjax._util.errors import OptionError
from specjax.registry import METHODS, MethodSpec, method


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table: a method under one sampling at one batch size."""

    method: str
    options: Mapping[str, Any]
    sampling: sj.Sampling
    batch_size: int
    swept: tuple[str, ...] = ()  # the options whose values tell this case from its neighbors

    @property
    def label(self) -> str:
        return " ".join([self.method, *(f"{name}={self.options[name]}" for name in self.swept)])

    @property
    def mode(self) -> str:
        return "greedy" if self.sampling.temperature == 0 else "sampled"


def make_cases(args: argparse.Namespace, has_draft: bool) -> list[Case]:
    """Every method × sampling × batch size; plain decoding always comes first.

    Raises:
      OptionError: no such method or option.
    """
    specs = [method(name) for name in _names(args.methods, has_draft)]
    settings, sweeps = dict(args.set), dict(args.sweep)
    unused = {name for name in settings if not any(options_of(s, {name: ""}) for s in specs)}
    if unused:
        raise OptionError(f"--set {min(unused)}: no chosen method has that option")
    for option in sweeps:
        if not any(option in spec.options for spec in specs):
            raise OptionError(f"--sweep {option}: no chosen method has that option")
    sampled = sj.Sampling(args.temperature, args.top_k, args.top_p)
    samplings = [sj.Sampling()] * (not args.sampled_only) + [sampled] * (not args.greedy_only)
    runs = []
    for spec in specs:
        own, swept = options_of(spec, settings), tuple(o for o in sweeps if o in spec.options)
        for values in itertools.product(*(sweeps[option] for option in swept)):
            options = spec.resolve(own | dict(zip(swept, values, strict=True)))
            runs.append((spec.name, options, swept))
    return [
        Case(name, options, sampling, size, swept)
        for size in args.batch_size
        for sampling in samplings
        for name, options, swept in runs
    ]


def _names(methods: str | None, has_draft: bool) -> list[str]:
    """The methods of ``--methods``; of ``all`` and of the default those that fit the models."""
    if methods in (None, "all"):
        specs = [METHODS[name] for name in (METHODS if methods else DEFAULT)]
        names = [s.name for s in specs if not s.needs_reward and (has_draft or not s.needs_draft)]
    else:
        names = methods.split(",")
    return ["autoregressive", *(name for name in names if name != "autoregressive")]


def options_of(spec: MethodSpec, settings: Mapping[str, str]) -> dict[str, str]:
    """A method's part of ``--set``: OPTION=VALUE, and METHOD.OPTION=VALUE, which wins."""
    shared = {name: value for name, value in settings.items() if name in spec.options}
    prefix = spec.name.replace("-", "_") + "."  # as the type of --set spells it
    own = {n.removeprefix(prefix): value for n, value in settings.items() if n.startswith(prefix)}
    return shared | own
