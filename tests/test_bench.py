"""infer.bench end to end on a tiny pair, and its figures' arithmetic."""

import json

import pytest

from infer import bench
from specjax.metrics import expected_block_efficiency, expected_speedup, perplexity, rates


def run(capsys, *argv):
    code = bench.main(list(map(str, argv)))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_report_has_every_case_and_figure(tiny_pair_dirs, tmp_path, capsys):
    target, draft = tiny_pair_dirs
    code, out, _ = run(capsys, "--target", target, "--draft", draft, "--num-prompts", 2,
                       "--repeats", 1,
                       "--max-new-tokens", 6, "--batch-size", "1,2", "--set", "gamma=2", "--json",
                       "--out", tmp_path / "out")  # fmt: skip
    assert code == 0
    report = json.loads(out)
    cases = {(r["method"], r["mode"], r["batch_size"]) for r in report["rows"]}
    assert cases == {(m, s, b) for m in ("autoregressive", "speculative")
                     for s in ("greedy", "sampled") for b in (1, 2)}  # fmt: skip
    for row in report["rows"]:
        assert row["tokens_per_second"] > 0
        if row["method"] == "speculative":
            assert row["speedup"] > 0 and row["options"]["gamma"] == 2
        if row["mode"] == "greedy":
            assert row["mismatches"] == []
    assert list(report["v"]) == ["1", "2", "4", "8", "16", "32", "64"]
    assert report["v"]["1"] == 1 and report["c"] > 0
    written = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert written == ["bench.json", "bench.md", "bench.png"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--methods", "nope"], "nope"),
        (["--set", "gama=3"], "gama"),
        (["--batch-size", "0"], "--batch-size"),
        (["--repeats", "0"], "--repeats"),
        (["--peer", "vllm"], "transformers"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_bad_arguments_are_one_line(tiny_pair_dirs, capsys, argv, says):
    target, draft = tiny_pair_dirs
    code, out, err = run(capsys, "--target", target, "--draft", draft, "--num-prompts", 1, *argv)
    assert (code, out) == (2, "")
    assert says in err.splitlines()[-1]
    assert "Traceback" not in err


def test_random_target_of_an_unknown_size(capsys):
    code, _, err = run(capsys, "--random-target", "9t")
    assert code == 2 and "100m" in err


def test_rates_and_cost_model():
    counters = {"accepted": 6, "tested": 8, "drafted": 12, "emitted": 10, "rounds": 4,
                "target_calls": 4}  # fmt: skip
    assert rates(counters) == {
        "acceptance_rate": 0.75, "accept_rate_per_draft": 0.5, "block_efficiency": 2.5,
        "tokens_per_target_call": 2.5,
    }  # fmt: skip
    assert rates(dict.fromkeys(counters, 0))["acceptance_rate"] is None
    assert expected_block_efficiency(0.5, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert expected_block_efficiency(1.0, 3) == 4
    assert expected_speedup(0.5, 3, c=0.1, v=1.2) == pytest.approx(1.875 / 1.5)
    assert perplexity([]) is None
    assert perplexity([-1.0, -3.0]) == pytest.approx(7.389056)
