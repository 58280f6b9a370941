"""What the papers' experiments need: figures per run, grids, bounds, entropies and configs."""

import types

import numpy as np
import pytest

import specjax as sj
from infer import config
from infer.bench import commands as bench
from infer.bench import entropies
from infer.bench.cases import Case, make_cases
from infer.bench.estimates import add_ratio
from infer.bench.predictions import add_expected
from infer.bench.report import tables
from infer.bench.timed_cases import Result
from infer.tune import commands as tune
from infer.tune.lossy import choose
from specjax._util.errors import OptionError
from specjax.core.types import FROM_DRAFT, FROM_TARGET


def test_each_run_has_a_figure_and_all_runs_have_one():
    row = {"label": "x", "mode": "sampled", "batch_size": 1, "pm": {}, "runs": {}}
    above, below = np.array([[1.0, 2.0], [3.0, 0.0]]), np.array([[2.0, 2.0], [2.0, 4.0]])
    add_ratio(row, "acceptance_rate", above, below)
    assert row["acceptance_rate"] == 0.6 and row["runs"]["acceptance_rate"] == [0.75, 0.5]
    # The mean is 0.625. Two runs 0.25 apart have s = 0.25 / √2, so the error s / √2 is 0.125.
    shown = {"rows": [row], "cost": [], "metrics": {}, "peers": [], "v": {}}
    head, cells = next(t for t in tables(shown) if t[0][0].startswith("mean ± standard error"))
    assert cells[0][head.index("acceptance")] == "0.62 ± 0.12"


def test_the_speedup_at_a_given_cost_is_the_papers():
    def row(method):
        rates = {"acceptance_rate": 0.5, "runs": {"acceptance_rate": [0.5]}}
        return {"method": method, "options": {"gamma": 1}} | rates

    rows = [row("speculative"), row("scd"), row("mtad")]
    add_expected(rows, [0.05])
    assert rows[0]["expected_at_0.05"] == pytest.approx(1.5 / 1.05)
    assert rows[1]["expected_at_0.05"] == pytest.approx(1.5 / 1.075)
    assert rows[1]["runs"]["expected_at_0.05"] == pytest.approx([1.5 / 1.075])
    assert "expected_at_0.05" not in rows[2]


def test_entropies_are_split_by_accepted_and_rejected(target, draft, monkeypatch):
    """Rounds of γ = 2: two accepted and a bonus; one accepted, one rejected; one rejected."""
    wrote = np.array([FROM_DRAFT, FROM_DRAFT, FROM_TARGET, FROM_DRAFT, FROM_TARGET, FROM_TARGET])
    tokens = np.arange(6)
    run = types.SimpleNamespace(tokens=[tokens], origins=[wrote])

    def powers(net, row):
        """2ⁿ at cache position n, twice that for the draft, so that a sum shows its positions."""
        return 2.0 ** np.arange(row.shape[1]) * (1.0 if net.config == target.config else 2.0)

    monkeypatch.setattr(entropies, "_entropies", powers)
    case = Case("scd", {"gamma": 2, "stop": "never"}, sj.Sampling(1.0), 1)
    row = {"pm": {}, "runs": {}}
    # The prompt has 3 tokens: token i is drawn from the distribution at cache position 2 + i.
    entropies.add_entropies([row], target, draft, [[7, 8, 9]], [Result(case, [run])])
    assert row["target_accepted"] == pytest.approx((4 + 8 + 32) / 3)
    assert row["target_rejected"] == pytest.approx((64 + 128) / 2)
    assert row["draft_accepted"] == pytest.approx(2 * (4 + 8 + 32) / 3)


def test_an_entropy_is_the_distributions(target):
    row = np.array([[1, 2, 3, 4]], np.int32)
    p = np.exp(np.asarray(entropies.probs.log_softmax(target.net.rescore(row)[0]), np.float64))
    p = p[:, p.sum(0) > 0]
    np.testing.assert_allclose(
        entropies._entropies(target.net, row), -(p * np.log(p)).sum(1), rtol=1e-4
    )


def test_sweeps_make_a_grid():
    argv = ["--methods", "speculative,mtad", "--sweep", "gamma=1,2", "--sweep", "tau=0,0.5"]
    args = bench.parser().parse_args([*argv, "--greedy-only"])
    labels = [case.label for case in make_cases(args, True)]
    assert labels == [
        "autoregressive",
        "speculative gamma=1",
        "speculative gamma=2",
        *(f"mtad gamma={gamma} tau={tau}" for gamma in (1, 2) for tau in (0.0, 0.5)),
    ]


def test_batch_sizes_are_those_of_all_devices_of_a_mesh():
    """At batch size 1 a row's prefill is told apart, and with two rows at a time it is not."""
    args = bench.parser().parse_args(["--methods", "lookup", "--batch-size", "1,2,3"])
    cases = make_cases(args, False, mesh=types.SimpleNamespace(shape={"data": 2}))
    assert {case.batch_size for case in cases} == {2, 4}
    assert len(cases) == len(set(map(repr, cases)))


def test_the_fastest_point_within_the_bound_is_chosen():
    def row(cost, perplexity, rouge_l=None):
        return {"cost": cost, "perplexity": perplexity, "rouge_l": rouge_l}

    plain = row(1.0, 10.0, 0.5)
    grid = [row(0.5, 11.0, 0.4), row(0.6, 10.4, 0.48), row(0.7, 9.0, 0.6), row(0.8, 9.0, 0.6)]
    assert choose(grid, plain, "perplexity", "plain", 0.05) == (grid[1], True)
    assert choose(grid, plain, "perplexity", "plain", 0.1) == (grid[0], True)
    assert choose(grid, plain, "perplexity", "best", 0.0) == (grid[2], True)
    assert choose(grid, plain, "rouge_l", "plain", 0.05) == (grid[1], True)
    assert choose(grid[:1], plain, "perplexity", "plain", 0.05) == (grid[0], False)
    of_rows = [one | {"perplexity_of_rows": 20 - one["perplexity"]} for one in [plain, *grid]]
    plain_of_rows, *grid_of_rows = of_rows  # the reverse of the perplexity over tokens
    chosen = choose(grid_of_rows, plain_of_rows, "perplexity_of_rows", "plain", 0.05)
    assert chosen == (grid_of_rows[0], True)
    chosen = choose(grid_of_rows[2:], plain_of_rows, "perplexity_of_rows", "plain", 0.05)
    assert chosen == (grid_of_rows[2], False)
    chosen = choose(grid_of_rows, plain_of_rows, "perplexity_of_rows", "best", 0.0)
    assert chosen == (grid_of_rows[0], True)
    with pytest.raises(OptionError, match="--quality rouge_l needs prompts with references"):
        choose(grid, row(1.0, 10.0), "rouge_l", "plain", 0.05)


def test_a_config_gives_options_and_the_command_line_wins(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(
        'max-new-tokens = 9\nmethods = ["block", "mtad"]\ngreedy_only = true\njson = false\n'
        'set = ["gamma=2", "tau=0.3"]\nsweep = ["gamma=1..2"]\n'
    )
    argv = ["--config", str(file), "--set", "gamma=5", "--methods", "speculative"]
    args = config.parse_with_config(bench.parser(), argv)
    assert (args.max_new_tokens, args.methods, args.greedy_only, args.json) == (
        9,
        "speculative",
        True,
        False,
    )
    assert dict(args.set) == {"gamma": "5", "tau": "0.3"}
    assert args.sweep == [("gamma", ["1", "2"])]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gama = 3", "there is no option gama"),
        ("config = 'x'", "there is no option config"),
        ("json = 3", "expected true or false"),
        ("seed = [true]", "expected a text, a number or a list of them"),
        ("[bench]\nseed = 3", "there is no option bench"),
        ("seed = ", "c.toml: Invalid value"),
        ("seed = -3", "expected a whole number from 0"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_config_is_one_line(tmp_path, capsys, text, says):
    file = tmp_path / "c.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        config.parse_with_config(bench.parser(), ["--config", str(file)])
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--grid", "tau=0,1"], "--grid is for the other methods"),
        (["--test-sample", "3"], "--test-sample needs --test"),
        (["--sample", "3"], "need --dataset"),
        (
            ["--method", "mtad", "--top-p", "0.5,0.6"],
            "--top-p: expected one number for --method mtad",
        ),
        (["--bound", "plain:2"], "expected plain:SHARE or best:SHARE"),
    ],
)
def test_wrong_arguments_of_tuning_are_one_line(argv, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        tune.parse(["prompts.jsonl", "--out", "x", *argv])
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
