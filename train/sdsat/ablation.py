"""SDSAT's ablation: one start, one budget, one change at a time; a table and Figure 5.

python -m train.ablation CONFIG.toml [--set section.key=value ...] [--only NAME,...]

Each variant is a run of train.sdsat in a directory of its own below ``run.dir``. Started again,
finished variants are kept and a broken one goes on from its last checkpoint; the table and the
figure are of what is finished.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax.errors import InputError, SpecjaxError
from specjax.files import write_text
from train.config import SDSATConfig, from_toml
from train.engine.loop import TrainingError
from train.sdsat import program as sdsat

CONTINUED, REFERENCE = "none", "isolated-self"
DATA = ("sdsat.adaptive_targets=data",)
# What each variant changes in the config, which itself is REFERENCE: the isolated loss, the
# model's own targets, one id, L = 5. In the order of what is asked of them.
VARIANTS: dict[str, tuple[str, ...]] = {
    CONTINUED: ("sdsat.loss=basic", "sdsat.start_rate=0.0", *DATA),
    REFERENCE: (),
    "improved-data": ("sdsat.loss=improved", *DATA),
    "isolated-data": DATA,
    "basic-data": ("sdsat.loss=basic", *DATA),
    "improved-self": ("sdsat.loss=improved",),
    "isolated-self-distinct": ("sdsat.distinct=true",),
    "isolated-self-L3": ("sdsat.window=3",),
    "isolated-self-L7": ("sdsat.window=7",),
    # A quarter of the weight on the adaptive mean: what the clean loss pays is a choice.
    "improved-data-w0.25": ("sdsat.loss=improved", "sdsat.weight=0.25", *DATA),
    "isolated-self-w0.25": ("sdsat.weight=0.25",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing, then writes ablation.json, .md and .png; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m train.ablation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG.toml")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a key for every variant; repeatable",
    )
    parser.add_argument("--only", metavar="NAME,…", help=f"some of {', '.join(VARIANTS)}")
    args = parser.parse_args(argv)
    names = args.only.split(",") if args.only else list(VARIANTS)
    try:
        if unknown := [name for name in names if name not in VARIANTS]:
            raise InputError(f"--only {unknown[0]}: expected some of {', '.join(VARIANTS)}")
        home = Path(from_toml(SDSATConfig, args.config, args.set).run.dir)
        for name in names:
            if not run_variant(args.config, args.set, home, name):
                return 0  # stopped by a signal, after saving
        rows = [read_variant(home / name) for name in VARIANTS if finished(home / name)]
        write(home, rows)
    except (InputError, SpecjaxError, TrainingError) as error:
        print(f"train.ablation: {error}", file=sys.stderr)
        return 1 if isinstance(error, TrainingError) else 2
    return 0


def finished(directory: Path) -> bool:
    """Whether the variant's run came to its end: the card is written last."""
    return (directory / "export" / "card.json").exists()


def run_variant(config: str, overrides: Sequence[str], home: Path, name: str) -> bool:
    """Starts the variant, or goes on with it; returns whether it is finished.

    Raises:
      InputError: it was started with other settings.
    """
    directory = home / name
    settings = [*overrides, *VARIANTS[name], f"run.dir={directory}"]
    cfg = from_toml(SDSATConfig, config, settings)
    if finished(directory):
        recipe = json.loads((directory / "export" / "card.json").read_text())["recipe"]
        now = json.loads(json.dumps(cfg, default=vars))
        # A key that is newer than the run had no say in it.
        changed = [
            f"{part}.{key}"
            for part, values in recipe.items()
            for key, value in values.items()
            if now[part].get(key) != value
        ]
        if changed:
            raise InputError(
                f"{directory} was made with another {changed[0]}: choose another "
                "directory with --set run.dir=…"
            )
        return True
    print(f"train.ablation: {name}", file=sys.stderr)
    resume = (directory / "metrics.jsonl").exists()
    return sdsat.main(cfg, resume=resume, dry_run=False)["finished"]


def read_variant(directory: Path) -> dict[str, Any]:
    """A finished variant's figures: those of its card, and the held-out curve."""
    card = json.loads((directory / "export" / "card.json").read_text())
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    curve = [(line["step"], line["valid_clean_loss"]) for line in lines if "valid_loss" in line]
    return {
        "variant": directory.name,
        "clean_tokens": card["clean_tokens_per_step"] * card["steps"],
        "compute_against_improved": card["compute_against_improved"],
        "clean_loss": card["held_out_clean_loss"],
        "acceptance": card["held_out_acceptance"],
        "accepted": card["held_out_accepted"],
        "tokens_per_round": card.get("held_out_decode_tokens_per_round"),
        "curve": curve,
    }


def write(home: Path, rows: list[dict[str, Any]]) -> None:
    """The report's files; the figure where matplotlib is there."""
    write_text(home / "ablation.json", json.dumps(rows, indent=1) + "\n")
    text = markdown(rows)
    write_text(home / "ablation.md", text)
    print(text, end="")
    try:
        import matplotlib
    except ImportError:
        print('no figure: it needs matplotlib, pip install "specjax[plots]"', file=sys.stderr)
        return
    matplotlib.use("Agg")
    draw(home / "ablation.png", rows)


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line per variant; losses beside that of continued training without adaptive tokens."""
    base = next((row["clean_loss"] for row in rows if row["variant"] == CONTINUED), None)
    lines = [
        "| variant | clean tokens | held-out clean loss, nats | against none | compute against "
        "improved | acceptance per place | accepted per window | greedy tokens per round |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        change = "" if base is None else f"{row['clean_loss'] / base - 1:+.2%}"
        places = " ".join(f"{share:.3f}" for share in row["acceptance"])
        decoded = row["tokens_per_round"]
        lines.append(
            f"| {row['variant']} | {row['clean_tokens']:,} | {row['clean_loss']:.4f} | {change} "
            f"| {row['compute_against_improved']:.3f} | {places} | {row['accepted']:.3f} "
            f"| {'' if decoded is None else f'{decoded:.3f}'} |"
        )
    return "\n".join(lines) + "\n"


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """The paper's Figure 5, the clean loss of each variant, and acceptance per place."""
    from matplotlib import pyplot as plt

    figure, (losses, places) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, row in enumerate(rows):
        look = {"color": plt.colormaps["tab20"](number), "label": row["variant"]}
        if row["variant"] == CONTINUED:
            losses.plot(*zip(*row["curve"], strict=True), "--", **look)
            continue
        losses.plot(*zip(*row["curve"], strict=True), "-", **look)
        shares = row["acceptance"]
        places.plot(range(1, len(shares) + 1), shares, "o-", **look)
    losses.set(xlabel="step", ylabel="held-out clean loss, nats per token")
    places.set(xlabel="adaptive place", ylabel="windows that agree up to here")
    places.xaxis.get_major_locator().set_params(integer=True)
    losses.legend(fontsize=7)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
