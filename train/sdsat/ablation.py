"""The work of ``train.ablation``: run the variants, then make a table and a figure of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax._util.errors import InputError
from specjax._util.files import aside, markdown_table, write_text
from train.config import SDSATConfig, from_toml, to_dict
from train.engine.directory import without_local_paths
from train.engine.loop import METRICS
from train.engine.metrics import read_metrics
from train.engine.program import run_and_print
from train.sdsat import training as sdsat
from train.sdsat.variants import CONTINUED, VARIANTS

CARD = Path("export", "card.json")  # written last: a run that has one is finished
# The entries that every card has. Figures of held-out text are missing if nothing is held out.
FIGURES = {"recipe", "clean_tokens_per_step", "steps", "compute_against_improved"}


def run(args: argparse.Namespace) -> int:
    """Runs missing variants, then writes ablation.json, .md and .png; returns the exit code."""
    return run_and_print("train.ablation", lambda: compare(args.config, args.set, args.only))


def compare(config: str, overrides: Sequence[str], only: str | None) -> None:
    """Runs the variants that ``only`` names (all if None), and reports all that are finished.

    If a signal stops a variant (after saving), the others do not run and nothing is reported.
    """
    names = only.split(",") if only else list(VARIANTS)
    for name in names:
        if name not in VARIANTS:
            raise InputError(f"--only {name}: expected some of {', '.join(VARIANTS)}")

    home = Path(from_toml(SDSATConfig, config, overrides).run.dir)
    for name in names:
        if not run_variant(config, overrides, home, name):
            return
    finished = [home / name for name in VARIANTS if os.path.exists(home / name / CARD)]
    write_report(home, [read_variant(directory) for directory in finished])


def run_variant(config: str, overrides: Sequence[str], home: Path, name: str) -> bool:
    """Starts or resumes the variant; returns whether it is finished.

    Raises:
      InputError: it was started with other settings.
    """
    directory = home / name
    cfg = from_toml(SDSATConfig, config, [*overrides, *VARIANTS[name], f"run.dir={directory}"])
    if os.path.exists(directory / CARD):
        _check_recipe(directory, to_dict(cfg))
        return True
    print(f"train.ablation: {name}", file=sys.stderr)
    resume = os.path.exists(directory / METRICS)
    return sdsat.main(cfg, resume=resume, dry_run=False)["finished"]


def _check_recipe(directory: Path, now: dict[str, Any]) -> None:
    """Raises InputError if a finished run was made with other settings than ``now``."""
    now = without_local_paths(now, directory / CARD.parent)
    # Of a number of epochs, the recipe has the steps that the corpus gave.
    computed = ("optim", "total_steps") if now["optim"]["num_epochs"] else None
    for section, values in _read_card(directory)["recipe"].items():
        for key, value in values.items():
            # Keys that are newer than the run are not in its recipe, and not compared.
            if now[section].get(key) != value and (section, key) != computed:
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
    if not isinstance(card, dict) or not card.keys() >= FIGURES:
        raise InputError(
            f"{path} is not the card of a finished run: remove it, and the run goes on"
        )
    return card


def read_variant(directory: Path) -> dict[str, Any]:
    """A finished variant's figures from its card, and the curves of its clean losses."""
    card = _read_card(directory)
    records = list(read_metrics(directory / METRICS))
    training = [(r["step"], r["loss"]) for r in records if "loss" in r]
    curve = [(r["step"], r["valid_loss"]) for r in records if "valid_loss" in r]
    return {
        "variant": directory.name,
        "clean_tokens": card["clean_tokens_per_step"] * card["steps"],
        "compute_against_improved": card["compute_against_improved"],
        "clean_loss": card.get("held_out_loss"),
        "acceptance": card.get("held_out_acceptance", []),
        "accepted": card.get("held_out_accepted"),
        "tokens_per_round": card.get("held_out_decode_tokens_per_round"),
        "training": training,
        "curve": curve,
    }


def write_report(home: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the report's files; without matplotlib, all but the figure."""
    write_text(home / "ablation.json", json.dumps(rows, indent=1) + "\n")
    text = markdown(rows)
    write_text(home / "ablation.md", text)
    print(text, end="")
    if not any(row["curve"] for row in rows):
        print("nothing is held out: no figure is of text that was not trained on", file=sys.stderr)
    try:
        import matplotlib
    except ImportError:
        print('no figure: it needs matplotlib, pip install "specjax[plots]"', file=sys.stderr)
        return
    matplotlib.use("Agg")
    draw(home / "ablation.png", rows)


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line per variant; losses also relative to training without adaptive tokens."""
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
        loss = row["clean_loss"]
        against = None if loss is None or base is None else loss / base - 1
        return [
            row["variant"],
            f"{row['clean_tokens']:,}",
            _cell(loss, ".4f"),
            _cell(against, "+.2%"),
            f"{row['compute_against_improved']:.3f}",
            " ".join(f"{share:.3f}" for share in row["acceptance"]),
            _cell(row["accepted"], ".3f"),
            _cell(row["tokens_per_round"], ".3f"),
        ]

    return markdown_table(head, [cells(row) for row in rows])


def _cell(value: float | None, form: str) -> str:
    """A figure of the table; empty if there is none."""
    return "" if value is None else format(value, form)


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """The paper's Figure 5, the clean loss in training, beside the held-out one and acceptance."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    training, held_out, places = axes
    for number, row in enumerate(rows):
        name = row["variant"]
        color = plt.colormaps["tab20"](number)
        line = "--" if name == CONTINUED else "-"
        for axis, points in ((training, row["training"]), (held_out, row["curve"])):
            steps = [step for step, _ in points]
            losses = [loss for _, loss in points]
            axis.plot(steps, losses, line, marker=".", color=color, linewidth=1, label=name)
        if name != CONTINUED:  # it has no adaptive tokens that could draft
            shares = row["acceptance"]
            places.plot(range(1, len(shares) + 1), shares, "o-", color=color)

    training.set(xlabel="training step", ylabel="training loss of standard tokens, nats")
    held_out.set(xlabel="training step", ylabel="held-out loss of standard tokens, nats")
    places.set(xlabel="adaptive place", ylabel="windows that agree up to here")
    for axis in axes:
        axis.xaxis.get_major_locator().set_params(integer=True)
    handles, names = training.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=6, fontsize=8)
    with aside(path) as scratch:
        figure.savefig(scratch, dpi=130, format="png")
    plt.close(figure)
