"""docs/tools/measure_gpu.py runs here too, without an accelerator, at tiny shapes."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TOOLS = Path(__file__).parents[2] / "docs/tools"
TINY = ("--target", "tiny", "--batch", "2", "--max-new-tokens", "6")


@pytest.fixture
def rows_of(monkeypatch, capsys):
    """Runs a part in this process, and returns its rows."""
    monkeypatch.syspath_prepend(str(TOOLS))
    import measure_gpu

    monkeypatch.setattr(measure_gpu, "GAMMAS", (2,))
    monkeypatch.setattr(measure_gpu, "CHANCES", (0.0, 1.0))
    monkeypatch.setattr(measure_gpu, "WIDTHS", (1, 4))
    monkeypatch.setattr(measure_gpu, "PASS_WIDTHS", (8,))
    monkeypatch.setattr(measure_gpu, "LOSSLESS", ("speculative",))

    def run(part, *argv):
        measure_gpu.main(["--only", part, *argv])
        lines = capsys.readouterr().out.splitlines()
        return [json.loads(line.removeprefix(measure_gpu.ROW)) for line in lines]

    return run


def test_every_part_has_its_rows(rows_of):
    import measure_gpu

    speed = rows_of("speed", *TINY)
    assert [row["hidden size"] for row in speed] == [32, 64]
    for row, part in zip(speed, ("draft", "target"), strict=True):
        # Weights, and of both rows the prompt of 128 tokens and half of the six new ones.
        held = measure_gpu.pass_bytes(measure_gpu.shape("tiny", part), 2, 128 + 3)
        assert row["GB/s"] == pytest.approx(held * row["tokens/s"] / 2 / 1e9)
    assert [row["tokens"] for row in rows_of("curve", *TINY)] == [1, 4]
    # The chances asked for.
    assert [row["λ"] for row in rows_of("acceptance", *TINY)] == [0, 1]
    (attention,) = rows_of("attention", *TINY)
    assert 0 < attention["error"] < 1e-3
    (training,) = rows_of("training", *TINY)
    assert training["tokens/s"] > 0


def test_equality_counts_rows_that_differ(rows_of):
    rows = rows_of("equality", "--rows", "2", "--max-new-tokens", "3", "--dtype", "float32")
    assert rows == [{"pass width": 8, "method": "speculative", "differ": 0}]


def test_a_part_that_fails_leaves_the_others(rows_of, monkeypatch, tmp_path, capsys):
    """Each part is a process of its own. A test that it cannot collect ends the first."""
    import measure_gpu

    out = tmp_path / "gpu.json"
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    measure_gpu.main(["tests", "device", "--out", str(out)])
    kept = json.loads(out.read_text())
    assert kept["tests"][0]["exit"] == 4
    assert kept["device"][0]["device"].startswith("cpu")
    assert "| tests | exit | said |" in capsys.readouterr().out
