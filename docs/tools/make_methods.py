"""Writes docs/methods.md from the table of methods: python docs/tools/make_methods.py"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

import specjax as sj
from specjax._util.errors import PairError
from specjax._util.files import markdown_table
from specjax.models import ModelConfig, init_params
from specjax.models.families.head_config import HeadConfig
from specjax.registry import (
    DRAFTERS,
    METHODS,
    RULES,
    SEARCHES,
    TARGET_DISTS,
    Context,
    Option,
    compose,
    presets,
)

DISTS = tuple(TARGET_DISTS)  # the warped target is the first
PAGE = Path(__file__).parents[1] / "methods.md"
HEAD = """# Methods

<!-- Written by docs/tools/make_methods.py from specjax/registry/; a test keeps it current. -->

A method is a drafter, a target distribution and an acceptance rule. **Lossless** means that the
emitted sequence is distributed exactly as sampling token by token from the target distribution,
warped by the run's temperature, top-k and top-p.
"""

PRESETS = """## Presets

Set `--set preset=NAME`, or `options={"preset": NAME}`. A preset fills in options of the method that
you do not give yourself.

"""

MATRIX = """## Every drafter with every rule

Set `--drafter NAME --rule NAME --target-dist NAME`. ✓ is lossless, ~ lossy, – refused before
compiling. The table is the same for all target distributions, with one exception: of a `head`,
`contrastive` accepts only chains (`tree=none`). `adaptive` needs a target that SDSAT has tuned.
"""

REASONS = """How drafts are sampled:

- `iid`: drawn independently from q.
- `point_mass`: certain tokens, q is 1 there.
- `without_replacement`: siblings drawn without replacement.
- `deterministic`: chosen by rank, with no q.

Why pairs are refused:
"""


def make_page() -> str:
    """The page: named methods, parts with their options, and all pairs."""
    named = [
        [f"`{s.name}`", _composition(s), "yes" if s.lossless else "no", s.summary, s.paper]
        for s in METHODS.values()
    ]
    columns = ("method", "drafter × rule", "lossless", "what it does", "from")
    parts = [HEAD, markdown_table(columns, named)]
    for title, table in (
        ("Drafters", DRAFTERS),
        ("Target distributions", TARGET_DISTS),
        ("Rules", RULES),
        ("Searches", SEARCHES),
    ):
        rows = [[f"`{name}`", part.summary, _options(part.options)] for name, part in table.items()]
        parts.append(f"## {title}\n\n" + markdown_table(("name", "what it is", "options"), rows))
    rows = [[f"`{s}`", f"`{part}`", _values(filled)] for part, s, filled in presets()]
    parts.append(PRESETS + markdown_table(("preset", "of", "fills in"), rows))
    return "\n".join([*parts, _matrix()])


def _matrix() -> str:
    """The table of drafters and rules, and the reason of each refusal."""
    model, reasons = _tiny(), []
    lines = [MATRIX]
    rows = []
    for drafter in DRAFTERS:
        cells = []
        draft = _tiny_head(model) if drafter == "head" else model
        target = _tuned(model) if drafter == "adaptive" else model
        for rule in RULES:
            reason, *others = (_refusal(compose(drafter, rule, t), target, draft) for t in DISTS)
            same = all(other == reason for other in others)
            assert same or drafter == "head", "the page says that the target does not matter"
            if reason is None:
                cells.append("✓" if compose(drafter, rule).lossless else "~")
            else:
                cells.append("–")
                reasons.append(f"- `{drafter}` × `{rule}`: {reason}.")
        rows.append([f"`{drafter}`", *cells])
    lines.append(markdown_table(("drafter", *(f"`{rule}`" for rule in RULES)), rows))
    return "\n".join([*lines, REASONS, *reasons, ""])


def _refusal(spec, model: sj.LM, draft: sj.LM) -> str | None:
    try:
        spec.build(Context(model, draft), {})
    except PairError as error:
        return str(error)
    return None


def _tiny() -> sj.LM:
    cfg = ModelConfig.llama(
        vocab_size=64, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8
    )
    return sj.from_params(cfg, init_params(cfg, jax.random.key(0)))


def _tuned(model: sj.LM) -> sj.LM:
    """The model as one that SDSAT has tuned."""
    return dataclasses.replace(
        model, config=dataclasses.replace(model.config, adaptive_ids=(61, 62, 63))
    )


def _tiny_head(target: sj.LM) -> sj.LM:
    cfg = HeadConfig.of(target.config, layer_ids=(0, 0, 0))
    return sj.from_params(cfg, init_params(cfg, jax.random.key(0)))


def _composition(spec) -> str:
    if spec.search:
        return "a search of its own"
    text = f"`{spec.drafter}` × `{spec.rule}`"
    if spec.target_dist != "warped":
        text += f", `{spec.target_dist}`"
    return f"{text}; {_values(spec.defaults)}" if spec.defaults else text


def _options(options: Mapping[str, Option]) -> str:
    return "; ".join(f"{_said(name, o.default)} {o.help}" for name, o in options.items())


def _values(options: Mapping[str, Any]) -> str:
    return ", ".join(itertools.starmap(_said, options.items()))


def _said(name: str, value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()
    return f"`{name}={text}`"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
