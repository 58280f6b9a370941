"""What reports share: rows as the cells of a table, and pictures in files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax._util.files import aside

# A column: its head, the key of its values in the rows, and their format.
Column = tuple[str, str, str]
# A table: column heads, and rows of cells.
Table = tuple[list[str], list[list[str]]]


def fill(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> Table:
    """The rows as a table of text; columns without any value are left out.

    A row's ``pm`` has the ± of its values. Text such as "n/a" is kept as it is.
    """
    used = [column for column in columns if any(row.get(column[1]) is not None for row in rows)]
    heads = [head for head, _, _ in used]
    cells = [[_cell(row, key, form) for _, key, form in used] for row in rows]
    return heads, cells


def _cell(row: dict[str, Any], key: str, form: str) -> str:
    """A value with its ±, formatted; empty if the row has none."""
    value = row.get(key)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    half_width = row.get("pm", {}).get(key)
    text = form.format(value)
    return f"{text} ± {form.format(half_width)}" if half_width else text


def sort_key(value: Any) -> tuple[str, Any]:
    """The order of an option's values, which may be of several kinds: numbers come first."""
    kind = "" if isinstance(value, int | float) else type(value).__name__
    return kind, value


def pyplot() -> Any:
    """matplotlib.pyplot for pictures in files; None without the plots extra."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_figure(figure: Any, path: Path) -> Path:
    """Writes a PNG, never half of it, and closes the figure."""
    with aside(path) as scratch:
        figure.savefig(scratch, dpi=130, format="png")
    pyplot().close(figure)
    return path
