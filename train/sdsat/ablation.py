"""The ablation's work: the variants' runs, then a table and a figure of what is finished."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax._util.errors import InputError
from specjax._util.files import aside, markdown_table, write_text
from train.config import SDSATConfig, from_toml, to_dict
from train.engine.loop import METRICS
from train.engine.metrics import read_metrics
from train.engine.program import finish
from train.sdsat import training as sdsat
from train.sdsat.variants import CONTINUED, VARIANTS

CARD = Path("export", "card.json")  # written last: what has one is finished
FIGURES = {"clean_tokens_per_step", "steps", "compute_against_improved"} | {
    f"held_out_{name}" for name in ("clean_loss", "acceptance", "accepted")
}  # of a card, that the report shows


def run(args: argparse.Namespace) -> int:
    """Runs what is missing, then writes ablation.json, .md and .png; returns the exit code."""
    return finish("train.ablation", lambda: compare(args.config, args.set, args.only))


def compare(config: str, overrides: Sequence[str], only: str | None) -> None:
    """Runs the variants ``only`` names (all when None) and reports all that are finished.

    Nothing is reported where a signal stops one of them, after saving.
    """
    names = only.split(",") if only else list(VARIANTS)
    if unknown := [name for name in names if name not in VARIANTS]:
        raise InputError(f"--only {unknown[0]}: expected some of {', '.join(VARIANTS)}")
    home = Path(from_toml(SDSATConfig, config, overrides).run.dir)
    if all(run_variant(config, overrides, home, name) for name in names):
        done = [home / name for name in VARIANTS if (home / name / CARD).exists()]
        write(home, [read_variant(directory) for directory in done])


def run_variant(config: str, overrides: Sequence[str], home: Path, name: str) -> bool:
    """Starts the variant, or goes on with it; returns whether it is finished.

    Raises:
      InputError: it was started with other settings.
    """
    directory = home / name
    cfg = from_toml(SDSATConfig, config, [*overrides, *VARIANTS[name], f"run.dir={directory}"])
    if (directory / CARD).exists():
        _check_recipe(directory, to_dict(cfg))
        return True
    print(f"train.ablation: {name}", file=sys.stderr)
    resume = (directory / "metrics.jsonl").exists()
    return sdsat.main(cfg, resume=resume, dry_run=False)["finished"]


def _check_recipe(directory: Path, now: dict[str, Any]) -> None:
    for section, values in _read_card(directory)["recipe"].items():
        for key, value in values.items():
            # A key that is newer than the run had no say in it.
            if now[section].get(key) != value:
                raise InputError(
                    f"{directory} was made with another {section}.{key}: choose another "
                    "directory with --set run.dir=…"
                )


def _read_card(directory: Path) -> dict[str, Any]:
    path = directory / CARD
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        card = None
    if not isinstance(card, dict) or not FIGURES | {"recipe"} <= card.keys():
        raise InputError(f"{path} is no card of a finished run: remove it, and the run goes on")
    return card


def read_variant(directory: Path) -> dict[str, Any]:
    """A finished variant's figures: those of its card, and the held-out curve."""
    card, lines = _read_card(directory), read_metrics(directory / METRICS)
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
    head = (
        "variant",
        "clean tokens",
        "held-out clean loss, nats",
        "against none",
        "compute against improved",
        "acceptance per place",
        "accepted per window",
        "greedy tokens per round",
    )

    def cells(row: dict[str, Any]) -> list[str]:
        decoded = row["tokens_per_round"]
        return [
            row["variant"],
            f"{row['clean_tokens']:,}",
            f"{row['clean_loss']:.4f}",
            "" if base is None else f"{row['clean_loss'] / base - 1:+.2%}",
            f"{row['compute_against_improved']:.3f}",
            " ".join(f"{share:.3f}" for share in row["acceptance"]),
            f"{row['accepted']:.3f}",
            "" if decoded is None else f"{decoded:.3f}",
        ]

    return markdown_table(head, [cells(row) for row in rows])


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """The paper's Figure 5, the clean loss of each variant, and acceptance per place."""
    from matplotlib import pyplot as plt

    figure, (losses, places) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, row in enumerate(rows):
        look = {"color": plt.colormaps["tab20"](number), "label": row["variant"]}
        drafts, shares = row["variant"] != CONTINUED, row["acceptance"]
        losses.plot(*zip(*row["curve"], strict=True), "-" if drafts else "--", **look)
        if drafts:
            places.plot(range(1, len(shares) + 1), shares, "o-", **look)
    losses.set(xlabel="step", ylabel="held-out clean loss, nats per token")
    places.set(xlabel="adaptive place", ylabel="windows that agree up to here")
    places.xaxis.get_major_locator().set_params(integer=True)
    losses.legend(fontsize=7)
    with aside(path) as scratch:
        figure.savefig(scratch, dpi=130, format="png")
    plt.close(figure)
