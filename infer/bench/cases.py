"""What is measured: every chosen method with its options, under each sampling, at each batch size.

A ``Case`` is one line of the report's table.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

import specjax as sj
from infer.bench.commands import DEFAULT
from infer.cli import check_grid
from infer.sampling_options import given_settings
from specjax._util.errors import OptionError
from specjax.core.mesh import round_up
from specjax.registry import METHODS, MethodSpec, method
from specjax.text.tokenizer import Tokenizer

PLAIN = "autoregressive"  # plain decoding, which speedups are relative to


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table: a method under one sampling at one batch size."""

    method: str
    options: Mapping[str, Any]
    sampling: sj.Sampling
    batch_size: int
    swept: tuple[str, ...] = ()  # names of options that ``--sweep`` varies

    @property
    def label(self) -> str:
        """The method, with the values of swept options: ``speculative gamma=2``."""
        return " ".join([self.method, *(f"{name}={self.options[name]}" for name in self.swept)])

    @property
    def mode(self) -> str:
        """``greedy`` or ``sampled``."""
        return "greedy" if self.sampling.temperature == 0 else "sampled"


def make_cases(
    args: argparse.Namespace,
    has_draft: bool,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
) -> list[Case]:
    """Every method × sampling × batch size; plain decoding always comes first.

    On a mesh batch sizes are rounded up, because each of its devices has as many rows.

    Raises:
      OptionError: no such method or option.
    """
    specs = [method(name) for name in _method_names(args.methods, has_draft)]
    settings = dict(args.set)
    sweeps = dict(args.sweep)
    _check_options(specs, settings, sweeps)

    settings_given = given_settings(args, tokenizer)
    samplings = []
    if not args.sampled_only:
        samplings.append(sj.Sampling(**settings_given))
    if not args.greedy_only:
        samplings.append(sj.Sampling(args.temperature, args.top_k, args.top_p, **settings_given))

    runs = []
    for spec in specs:
        given = options_of(spec, settings)
        swept = tuple(option for option in sweeps if option in spec.options)
        check_grid("--sweep", [sweeps[option] for option in swept])
        for values in itertools.product(*(sweeps[option] for option in swept)):
            options = spec.resolve(given | dict(zip(swept, values, strict=True)))
            runs.append((spec.name, options, swept))
    sizes = args.batch_size
    if mesh is not None:
        sizes = dict.fromkeys(round_up(size, mesh) for size in sizes)
    return [
        Case(name, options, sampling, size, swept)
        for size in sizes
        for sampling in samplings
        for name, options, swept in runs
    ]


def _check_options(
    specs: Sequence[MethodSpec], settings: Mapping[str, str], sweeps: Mapping[str, list[str]]
) -> None:
    """Refuses options of ``--set`` and ``--sweep`` that no chosen method has.

    Raises:
      OptionError: names the option.
    """
    unused = {name for name in settings if not any(options_of(s, {name: ""}) for s in specs)}
    if unused:
        raise OptionError(f"--set {min(unused)}: no chosen method has that option")
    for option in sweeps:
        if not any(option in spec.options for spec in specs):
            raise OptionError(f"--sweep {option}: no chosen method has that option")


def _method_names(methods: str | None, has_draft: bool) -> list[str]:
    """The methods of ``--methods``; from ``all`` and the default only those that fit the models."""
    if methods in (None, "all"):
        candidates = METHODS if methods else DEFAULT
        names = []
        for name in candidates:
            spec = METHODS[name]
            if not spec.needs_reward and (has_draft or not spec.needs_draft):
                names.append(spec.name)
    else:
        names = methods.split(",")
    return [PLAIN, *(name for name in names if name != PLAIN)]


def options_of(spec: MethodSpec, settings: Mapping[str, str]) -> dict[str, str]:
    """A method's options from ``--set``.

    ``OPTION=VALUE`` is for every method that has the option. ``METHOD.OPTION=VALUE`` is for one
    method, and overrides the former.
    """
    prefix = spec.name.replace("-", "_") + "."  # --set also replaces the hyphens
    shared = {}
    specific = {}
    for name, value in settings.items():
        if name in spec.options:
            shared[name] = value
        if name.startswith(prefix):
            specific[name.removeprefix(prefix)] = value
    return shared | specific
