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
    """The columns of which any row has a value; words such as "n/a" stand as they are.

    A row's ``pm`` holds the ± of its values.
    """

    def cell(row: dict[str, Any], key: str, form: str) -> str:
        value, half_width = row.get(key), row.get("pm", {}).get(key)
        if value is None or isinstance(value, str):
            return value or ""
        return form.format(value) + (f" ± {form.format(half_width)}" if half_width else "")

    columns = [column for column in columns if any(row.get(column[1]) is not None for row in rows)]
    cells = [[cell(row, key, form) for _, key, form in columns] for row in rows]
    return [head for head, *_ in columns], cells


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
