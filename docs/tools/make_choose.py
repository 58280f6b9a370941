# ruff: noqa: E501  (the tables of the page have a row a line)
"""Writes docs/choose.md from the table of methods and the overview's figures.

python docs/tools/make_choose.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specjax._util.files import markdown_table
from specjax.registry import METHODS, MethodSpec

DOCS = Path(__file__).parents[1]
PAGE = DOCS / "choose.md"
FIGURES = DOCS / "figures" / "overview.json"
HEAD = """# Which method for me

<!-- Written by docs/tools/make_choose.py from specjax/registry/; a test keeps it current. -->

A method drafts several tokens at a time, and the target model checks them in one pass. *Lossless* means that
drafts do not change how the text is distributed: it is that of plain decoding, and at temperature 0 the same text.
For the contrastive methods it is that of contrastive decoding. The other words are in the [glossary](glossary.md).

Start with what you have beside the target model:

| you have | take | then |
| --- | --- | --- |
| a smaller model with the same tokenizer | `speculative` with `gamma=auto`; for sampling with long drafts `block` | [speculative](pages/speculative.md) |
| a draft head, such as EAGLE-3 | `--drafter head`, which drafts a chain or a tree | [draft heads](pages/head.md) |
| a target tuned with SDSAT | `sdsat`; `sdsat-single` has one pass a round | [SDSAT](pages/sdsat.md) |
| nothing, and the output repeats the prompt | `lookup` | [lookup](pages/lookup.md) |
| nothing, and requests resemble one another | `suffix` | [suffix](pages/suffix.md) |
| nothing, and memory to spare on a GPU or TPU | `speculative` with `--draft self:int8`, a quantized copy of the target | [quantized weights](quantized.md) |
| nothing else, and time to train | train a draft head or a draft model, or tune the target | [a draft head](pages/train-head.md), [a draft model](pages/train-chats.md), [SDSAT](pages/sdsat.md#training) |

A method and its options are set the same way everywhere:

```bash
specjax run --target DIR --draft DIR --method speculative --set gamma=auto --prompt "def fib(n):"
```

```python
sj.generate(target, prompts, method="speculative", draft=draft, options={"gamma": "auto"})
```

Then look at how you decode:

| you want | take |
| --- | --- |
| the target's distribution exactly | a method that the tables below call lossless |
| the target's greedy text | the same methods at temperature 0 |
| large batches | chains (`speculative`, `block`) with `gamma=auto`, which stops drafting where it does not pay; a tree passes more tokens through the target for each it gains |
| one request at a time, on a GPU or TPU | trees (`specinfer`, or `--drafter head --rule match`), while decoding is bound by memory bandwidth (expected, not measured) |
| JSON, a grammar or banned words | any lossless method with [`sampling`](sampling.md) settings; tokens that a grammar forces are drafted |
| words or a topic that must occur | `cdsl`, `cdlh` or `cdlh-appx` with a [reward](pages/constrained.md) |
| more speed for a bounded change of the text | `mentored`, with a largest KL divergence; `bild` and `mtad` have no such bound |
| likelier text | `mtad`, `mtjd` or `beam` |
| text that a weak model would not write (contrastive decoding) | `contrastive`, and `scd`, which is faster |
| text that keeps closer to the prompt (classifier-free guidance) | any `--drafter` with a `--rule`, and `--target-dist guided` ([guidance](pages/guided.md)) |

How much faster it is depends on the processor and on how well the draft fits your texts. Measure your own pair
before you choose:

```bash
python -m infer.bench --target DIR --draft DIR --methods speculative,block,lookup --prompts YOURS.jsonl
```

A chat model takes `--chat`. Then `python -m infer.tune YOURS.jsonl --method speculative --target DIR --draft DIR
--out RESULTS` chooses γ. It also tunes `spectr`, `specinfer`, `mentored`, `bild`, `mtad`, `mtjd` and `cdsl`.

## By what a method needs

Tokens per round and speed over plain decoding are those of the [overview](pages/overview.md): the embedded
pair, greedy, batch 1, one CPU core. A speed below 1 is slower than plain decoding: on one core the further tokens of
a pass are not free. On a GPU they should nearly be; that is not measured yet. Small models repeat themselves, so
expect fewer tokens per round than here. `lookup` has γ = 10 there; its default, `gamma=auto`, falls back to plain
rounds where drafts fail. Methods without a figure are not in the overview, or have nothing to be compared with.
"""


def make_page() -> str:
    """The page: what to take for whom, and every method by what it needs."""
    rows = json.loads(FIGURES.read_text(encoding="utf-8"))["rows"]
    measured = {row["method"]: row for row in rows if row["mode"] == "greedy"}
    by_needs: dict[str, list[MethodSpec]] = {}
    for spec in METHODS.values():
        by_needs.setdefault(spec.needs, []).append(spec)

    parts = [HEAD]
    columns = ("method", "what it does", "lossless", "tokens per round", "speed")
    for needs, specs in by_needs.items():
        specs.sort(key=lambda spec: not spec.lossless)  # lossless ones first
        table = markdown_table(columns, [_row(spec, measured.get(spec.name, {})) for spec in specs])
        parts.append(f"### Needs {needs}\n\n{table}")
    parts.append("All options, and all pairs of drafters and rules: [methods](methods.md).\n")
    return "\n".join(parts)


def _row(spec: MethodSpec, row: dict[str, Any]) -> list[str]:
    lossless = "yes" if spec.lossless else "no"
    tokens = _with_interval(row, "block_efficiency")
    speed = _with_interval(row, "speedup")
    return [f"`{spec.name}`", spec.summary, lossless, tokens, speed]


def _with_interval(row: dict[str, Any], name: str) -> str:
    """A figure with its ±, or nothing where it was not measured."""
    value = row.get(name)
    if value is None:
        return ""
    spread = row["pm"].get(name)
    return f"{value:.2f} ± {spread:.2f}" if spread else f"{value:.2f}"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
