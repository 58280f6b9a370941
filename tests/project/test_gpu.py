"""docs/tools/measure_gpu.py runs here too, without an accelerator, at tiny shapes."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TOOLS = Path(__file__).parents[2] / "docs/tools"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import measure_gpu

    monkeypatch.setattr(measure_gpu, "GAMMAS", (2,))
    monkeypatch.setattr(measure_gpu, "CHANCES", (0.0, 1.0))
    monkeypatch.setattr(measure_gpu, "WIDTHS", (1, 4))
    monkeypatch.setattr(measure_gpu, "PASS_WIDTHS", (8,))
    monkeypatch.setattr(measure_gpu, "LOSSLESS", ("speculative",))
    return measure_gpu


def test_every_part_writes_its_rows(tool, tmp_path, capsys):
    out = tmp_path / "gpu.json"
    command = ["speed", "curve", "acceptance", "--target", "tiny", "--batch", "2"]
    tool.main([*command, "--max-new-tokens", "6", "--out", str(out)])
    kept = json.loads(out.read_text())
    assert [row["hidden size"] for row in kept["speed"]] == [64, 32]
    assert all(row["tokens/s"] > 0 and row["GB/s"] > 0 for row in kept["speed"])
    assert [row["tokens"] for row in kept["curve"]] == [1, 4]
    assert [row["λ"] for row in kept["acceptance"]] == [0, 1]  # the chances asked for
    assert "| hidden size | rows | tokens/s |" in capsys.readouterr().out


def test_equality_counts_rows_that_differ(tool, capsys):
    tool.main(["equality", "--rows", "2", "--max-new-tokens", "3", "--dtype", "float32"])
    assert "| 8 | speculative | 0 |" in capsys.readouterr().out
