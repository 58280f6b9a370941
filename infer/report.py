"""Benchmark reports: Markdown, JSON and, with the ``plots`` extra, a picture."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax.errors import OptionError

COLUMNS = (
    ("method", "method", "{}"),
    ("mode", "mode", "{}"),
    ("batch", "batch_size", "{}"),
    ("tokens/s", "tokens_per_second", "{:.0f}"),
    ("first token, ms", "first_token_ms", "{:.0f}"),
    ("speedup", "speedup", "{:.2f}"),
    ("acceptance", "acceptance_rate", "{:.2f}"),
    ("tokens/round", "block_efficiency", "{:.2f}"),
    ("predicted", "predicted_speedup", "{:.2f}"),
    ("measured/predicted", "measured_over_predicted", "{:.2f}"),
)


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    import jax

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    device = jax.devices()[0]
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "cpu": model,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown: the table, the peers, the cost curve."""
    where = report["machine"]
    lines = [
        f"{where['device']} ({where['cpu']}, {where['cores']} cores), jax {where['jax']}; target "
        f"{report['target']}, draft {report['draft']}; {report['prompts']} prompts, "
        f"{report['max_new_tokens']} new tokens each.",
        "",
    ]
    lines += _table([name for name, *_ in COLUMNS], (_cells(row) for row in report["rows"]))
    if report["peers"]:
        lines += ["", *_table(
            ["peer", "tokens/s", "ours", "ours / peer", "rows that differ"],
            ([p["name"], f"{p['tokens_per_second']:.0f}", p["ours"], f"{p['ratio']:.2f}",
              f"{len(p['mismatches'])}"] for p in report["peers"]),
        )]  # fmt: skip
    curve = report["v"]
    lines += [
        "",
        *_table(["T", *map(str, curve)], [["v(T)", *(f"{x:.2f}" for x in curve.values())]]),
    ]
    if report["c"] is not None:
        lines += ["", f"c = {report['c']:.3f} (draft step time / target step time)."]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    return ["" if row[key] is None else shape.format(row[key]) for _, key, shape in COLUMNS]


def _table(head: Sequence[str], rows: Any) -> list[str]:
    out = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return out + ["| " + " | ".join(row) + " |" for row in rows]


def write(directory: str, report: dict[str, Any]) -> list[Path]:
    """Writes bench.json and bench.md, and bench.png where matplotlib is there.

    Raises:
      OptionError: the directory cannot be made or written.
    """
    from specjax.models.hf import write_text

    home = Path(directory)
    try:
        home.mkdir(parents=True, exist_ok=True)
        write_text(home / "bench.json", json.dumps(report, indent=1) + "\n")
        write_text(home / "bench.md", markdown(report))
    except OSError as error:
        raise OptionError(f"--out {directory}: cannot be written ({error.strerror})") from None
    files = [home / "bench.json", home / "bench.md"]
    try:
        import matplotlib
    except ImportError:
        return files
    matplotlib.use("Agg")
    return [*files, _picture(home / "bench.png", report)]


def _picture(path: Path, report: dict[str, Any]) -> Path:
    """Speedup per method, and the cost curve."""
    from matplotlib import pyplot as plt

    figure, (bars, curve) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    rows = [row for row in report["rows"] if row["speedup"] is not None]
    labels = [f"{r['method']}\n{r['mode']}, batch {r['batch_size']}" for r in rows]
    bars.barh(labels, [r["speedup"] for r in rows], color="#4c78a8", label="measured")
    ticks = [(i, r["predicted_speedup"]) for i, r in enumerate(rows) if r["predicted_speedup"]]
    bars.plot([x for _, x in ticks], [i for i, _ in ticks], "|", color="#e45756", markersize=22,
              markeredgewidth=3, label="predicted from c, v and acceptance")  # fmt: skip
    bars.axvline(1, color="grey", linewidth=1)
    bars.set_xlabel("speedup over plain decoding")
    bars.invert_yaxis()
    bars.legend(loc="lower right", fontsize=8)
    widths = [int(width) for width in report["v"]]
    curve.plot(widths, list(report["v"].values()), "o-", color="#4c78a8", label="measured")
    curve.plot(widths, widths, ":", color="grey", label="one pass per token")
    curve.set(xscale="log", yscale="log", xlabel="T, tokens per target pass",
              ylabel="v(T), cost relative to one token")  # fmt: skip
    curve.set_xticks(widths, [str(w) for w in widths])
    curve.legend(fontsize=8)
    scratch = path.with_name(f".{path.name}")
    figure.savefig(scratch, dpi=130, format="png")
    os.replace(scratch, path)
    plt.close(figure)
    return path
