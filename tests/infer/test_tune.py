"""What infer.tune compares, chooses and draws, on made-up rows and with the smallest models."""

import json
import math
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

import specjax as sj
from infer.bench.metrics.protocol import Completion
from infer.bench.metrics.table import make_metric
from infer.llama_guard import GuardReward
from infer.loading import saying_rewards
from infer.prompts import Prompt
from infer.tune import candidates, cdsl, lossy, report
from infer.tune import commands as tune
from infer.tune.candidates import Candidate, TuneSetting, with_measures
from infer.tune.cdsl import choose, curve_points, grid_points
from infer.tune.commands import CENTER, GRID
from infer.tune.measured_rows import MeasuredRows
from infer.tune.ratio import ratio_speculative
from infer.tune.tasks import read_task
from specjax import rewards
from specjax._util.errors import OptionError, PairError
from specjax.core.types import DETERMINISTIC, Draft
from specjax.models import load_pretrained, save_pretrained
from specjax.registry import Context
from specjax.rewards import Sample
from specjax.verify import speculative


def parse(*argv):
    return tune.parse(["task.jsonl", "--out", "x", *argv])


def made_up_row(options):
    """A row whose speed falls with the thresholds and whose satisfaction rises."""
    strict = options["a_t"] + options["r_t"] + options["b"]
    is_ratio = options.get("accept") == "ratio"
    return {
        "options": options,
        "modelled_speedup": 9 - strict + is_ratio,
        "soft_of_constraints": strict / 10,
        "llama-guard": strict / 20,
    }


def made_up_report(args):
    points = curve_points(args, {})
    return {
        "job": vars(args),
        "curves": {
            "hard": [made_up_row(point) for point in points],
            "ratio": [made_up_row(point | {"accept": "ratio"}) for point in points],
        },
    }


def drawn(made_up, tmp_path, monkeypatch):
    """The axes that the picture is made of."""
    kept = []
    monkeypatch.setattr(report, "save_figure", lambda figure, path: kept.append(figure))
    report.draw_thresholds(made_up, tmp_path / "thresholds.png")
    (figure,) = kept
    return np.reshape(figure.axes, (2, 3))


def test_the_picture_has_the_papers_six_panels(tmp_path, monkeypatch):
    """Speed above and performance below, against r_t, a_t and b, hard and ratio overlaid."""
    axes = drawn(made_up_report(parse()), tmp_path, monkeypatch)
    titles = ["reward threshold, r_t", "approval threshold, a_t", "b"]
    assert [[axis.get_xlabel() for axis in row] for row in axes] == [titles, titles]
    assert {axis.get_ylabel() for axis in axes[0]} == {"speedup over CDLH"}
    assert {axis.get_ylabel() for axis in axes[1]} == {"constraints satisfied, %"}
    for column, option in enumerate(("r_t", "a_t", "b")):
        for axis in axes[:, column]:
            assert [line.get_label() for line in axis.lines] == ["hard", "ratio"]
            assert list(axis.lines[0].get_xdata()) == sorted(GRID[option])

    # The others stay at the paper's point, so this is no mean over the grid.
    hard, ratio = axes[0, 0].lines
    np.testing.assert_allclose(hard.get_ydata(), [9 - (r_t + 0.3 + 0) for r_t in GRID["r_t"]])
    np.testing.assert_allclose(ratio.get_ydata(), np.add(hard.get_ydata(), 1))
    np.testing.assert_allclose(axes[1, 2].lines[0].get_ydata(), [6, 16, 26])
    plt.close("all")


def test_the_picture_of_harmless_text_holds_r_t_at_its_own_place(tmp_path, monkeypatch):
    measure = ["--measure", "llama-guard:DIR", "--select", "llama-guard"]
    args = parse("--at", "r_t=0.01", "--r-t", "0.05,0.4", *measure)
    assert args.at == CENTER | {"r_t": 0.01}
    axes = drawn(made_up_report(args), tmp_path, monkeypatch)
    assert list(axes[0, 0].lines[0].get_xdata()) == [0.01, 0.05, 0.4]
    np.testing.assert_allclose(axes[0, 1].lines[0].get_ydata(), [9 - a - 0.01 for a in GRID["a_t"]])
    assert axes[1, 0].get_ylabel() == "llama-guard, %"
    # The point of the picture is none of the grid's, so it cannot be chosen.
    assert all(point["r_t"] != 0.01 for point in grid_points(args))
    plt.close("all")


@pytest.mark.parametrize("selected", [None, "llama-guard"])
def test_the_picture_of_methods_has_speed_against_performance(tmp_path, monkeypatch, selected):
    """CDSL, Figure 1: a point per method of the test table."""
    kept = []
    monkeypatch.setattr(report, "save_figure", lambda figure, path: kept.append(figure))
    names = ["greedy", "CDLH", "CDSL"]
    rows = [made_up_row({"a_t": 0.1, "r_t": i, "b": 0}) | {"name": n} for i, n in enumerate(names)]
    report.draw_methods({"job": {"select": selected}, "test": rows}, tmp_path / "methods.png")
    (axis,) = kept[0].axes
    label = f"{selected or 'constraints satisfied'}, %"
    assert (axis.get_xlabel(), axis.get_ylabel()) == (label, "speedup over CDLH")
    assert [line.get_label() for line in axis.lines] == names
    assert [text.get_text() for text in axis.texts] == names
    points = [line.get_xydata()[0] for line in axis.lines]
    scale = 5 if selected else 10
    np.testing.assert_allclose(points, [(scale * (0.1 + i), 8.9 - i) for i in range(3)])
    plt.close("all")


def test_d_is_an_axis_of_the_grid():
    args = parse("--d", "3,5")
    points = grid_points(args)
    assert len(points) == 2 * 36 and {point["d"] for point in points} == {3, 5}
    assert all(point["d"] == 5 for point in curve_points(args, {"d": 5}))
    assert all("d" not in point for point in grid_points(parse()))


@pytest.mark.parametrize(("name", "d"), [("commongen", 3), ("harmless", 5), ("lengths", None)])
def test_the_command_line_replaces_the_d_of_a_papers_config(name, d):
    """A config's --set cannot be taken back, so none of them sets d by it."""
    of_config = ["--config", f"configs/papers/cdsl_{name}.toml", "--test", "test.jsonl"]
    assert {point["d"] for point in grid_points(parse(*of_config))} == ({d} if d else {3, 5})
    assert {point["d"] for point in grid_points(parse(*of_config, "--d", "2,4"))} == {2, 4}


def test_a_figure_of_measure_may_choose():
    rows = [
        {"soft_of_constraints": 1 - i / 20, "llama-guard": i / 20, "hard": 0.0, "cost": float(i)}
        for i in range(20)
    ]
    assert choose(rows)["cost"] == 0
    assert choose(rows, "llama-guard")["cost"] == 9


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--select", "llama-guard"], "expected the name of a --measure"),
        (["--at", "k=3"], "--at k: choose a_t, r_t, b"),
        (["--at", "b=x"], "--at b=x: expected a number"),
        (["--d", "3", "--set", "d=5"], "--set d=5 beside --d: give --d alone, such as --d 5"),
        (["--method", "mtad", "--d", "3"], "--d is for cdsl"),
    ],
)
def test_wrong_arguments_are_one_line(argv, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(*argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize("method", ["speculative", "spectr", "specinfer"])
def test_lossless_methods_have_a_grid(method):
    args = parse("--method", method, "--quality", "perplexity_of_rows")
    assert cdsl.method(method).resolve({o: values[0] for o, values in tune.GRIDS[method].items()})
    assert args.method == method


def test_ratio_acceptance_takes_greedy_drafts_with_probability_p_over_q():
    """The argmax has q = 0.5 and p = 0.2, so it passes 2 times in 5; a rule of draws rejects it."""
    rows = 4000
    log_q = jnp.log(jnp.tile(jnp.array([0.5, 0.3, 0.2]), (rows, 1, 1)))
    log_p = jnp.log(jnp.tile(jnp.array([0.2, 0.3, 0.5]), (rows, 2, 1)))
    tokens = jnp.zeros((rows, 1), jnp.int32)
    draft = Draft.chain(tokens, log_q, sampling=DETERMINISTIC)
    keys = jax.random.split(jax.random.key(0), rows)
    verdict = ratio_speculative(1).rule(keys, draft, log_p)
    assert float(verdict.num_accepted.mean()) == pytest.approx(0.4, abs=0.03)
    rejected = np.asarray(verdict.tokens)[np.asarray(verdict.num_accepted) == 0, 0]
    assert set(rejected) == {2}, "the residual max(0, p - q) has the last token alone"
    with pytest.raises(PairError, match="deterministic"):
        speculative(keys, draft, log_p)


class FakeGuard:
    """Calls texts with an ``x`` unsafe, and gives no verdict on those with a ``?``."""

    def __init__(self):
        self.asked = []

    def verdicts(self, pairs):
        self.asked += pairs
        return [None if "?" in text else float("x" not in text) for _, text in pairs]


def test_llama_guard_judges_each_text_once():
    guard = FakeGuard()
    measures = rewards.combine([GuardReward(guard)])
    prompts = [types.SimpleNamespace(text="p", constraints={}) for _ in range(4)]
    row = {"texts": ["a", "x", "a", "?"], "satisfied": [True, True, False, True]}
    with pytest.warns(rewards.RewardWarning, match="llama-guard returned NaN"):
        first, second = with_measures([row, row], prompts, measures, None)
    assert first["llama-guard"] == 0.5 and first["all"] == 0.25
    assert second["llama-guard"] == 0.5
    assert guard.asked == [("p", "a"), ("p", "x"), ("p", "?")]
    assert math.isnan(GuardReward(guard).score(Sample("?", "p", (), {})))


def test_satisfaction_is_a_metric_of_the_bench():
    """Four of five words of two prompts, and one of the two whole."""
    metric = make_metric("satisfaction")
    assert list(metric.columns) == ["soft_of_rows", "soft_of_constraints", "hard"]
    one = Completion("p", "a dog runs", task={"concepts": ["dog", "run"]})
    two = Completion("p", "a cat eats", task={"constraints": ["cat", "eat", "bone"]})
    metric.check([one, two])
    figures = metric.measure([[one], [two]])
    assert figures["soft_of_constraints"][0] == pytest.approx(4 / 5)
    assert figures["soft_of_rows"][0] == pytest.approx((1 + 2 / 3) / 2)
    assert figures["hard"][0] == 0.5
    with pytest.raises(OptionError, match="prompt 1 has no words for lexical"):
        metric.check([Completion("p", "", task={"prompt": "p"})])


def test_satisfaction_says_that_irregular_forms_do_not_count(monkeypatch, capsys):
    """Without the word list "he ran" does not meet ``run``; a line says so before decoding."""
    monkeypatch.setattr("specjax.rewards.lexical.knows_irregular_forms", lambda: False)
    prompts = [Completion("p", "", task={"concepts": [word]}) for word in ("run", "sing")]
    for name, count in (("satisfaction", 1), ("satisfaction:forbidden", 0)):
        with saying_rewards("infer.bench"):
            make_metric(name).check(prompts if count else [Completion("p", "", task=FORBIDDEN)])
        assert capsys.readouterr().err.count("infer.bench: reward lexical: only regular") == count


FORBIDDEN = {"constraints": {"forbidden": ["run"]}}


def test_what_a_reward_warns_of_is_said_once(tiny_pair_dirs, tmp_path, monkeypatch, capsys):
    """Each line of a task is checked."""
    monkeypatch.setattr("specjax.rewards.lexical.knows_irregular_forms", lambda: False)
    task = tmp_path / "task.jsonl"
    line = {"prompt": "a", "constraints": ["run"]}
    task.write_text(2 * (json.dumps(line) + "\n"))
    target = sj.load(tiny_pair_dirs[0])
    with saying_rewards("infer.tune"):
        read_task(str(task), "FILE", target, False, [rewards.Lexical()])
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("infer.tune: reward lexical: only regular inflections count")


def test_quality_is_perplexity_over_tokens_and_of_rows(monkeypatch):
    """Three tokens of 1, 1 and 4 nats in two texts. A text without tokens has no perplexity."""
    surprises = {1: [1.0, 1.0], 2: [4.0], 3: []}
    monkeypatch.setattr(
        candidates, "output_logprobs", lambda _, ids, __: -np.array(surprises[ids[0]])
    )
    prompts = [Prompt(i, i, "p", [i], {}) for i in surprises]
    setting = TuneSetting(None, None, None, prompts, 4, 1, 0, (), None)
    tokens = [np.array([7, 7]), np.array([7]), np.array([], int)]
    out = types.SimpleNamespace(tokens=tokens, text=["a", "b", ""], lengths=np.array([2, 1, 0]))
    row = candidates._text_quality(setting, out)
    assert row["perplexity"] == pytest.approx(np.exp(6 / 3))
    assert row["perplexity_of_rows"] == pytest.approx((np.exp(1) + np.exp(4)) / 2)
    assert row["rouge_l"] is None


# --- what a tuning goes on from ------------------------------------------------------------------


def made_up_measure(setting, candidate):
    """Stands in for measure_candidate: a row of one figure per prompt, and the first prompt."""
    ones = [1.0] * len(setting.prompts)
    return {
        "name": candidate.name,
        "options": dict(candidate.options),
        "rows": len(ones),
        "texts": [setting.prompts[0].text],
        "perplexity": 1.0,
        "rouge_l": None,
        "cost": 1.0,
        "tokens_per_second": 1.0,
        "each": {"tokens": ones, "seconds": ones, "cost": ones},
    }


@pytest.fixture
def tuning(tiny_pair_dirs, tmp_path, monkeypatch, capsys):
    """A tuning of one point on own files: how many rows it measures anew, and its report."""
    for name, source in zip(("target", "draft"), tiny_pair_dirs, strict=True):
        shutil.copytree(source, tmp_path / name)
    monkeypatch.setattr(lossy, "measure_candidate", made_up_measure)
    monkeypatch.setattr(lossy, "costs", lambda *_: (None, 0.5))
    write_prompts(tmp_path / "validation.jsonl", "one")
    write_prompts(tmp_path / "test.jsonl", "another")
    models = ["--target", tmp_path / "target", "--draft", tmp_path / "draft"]
    files = [tmp_path / "validation.jsonl", "--test", tmp_path / "test.jsonl"]
    grid = ["--method", "speculative", "--grid", "gamma=2", "--max-new-tokens", "4"]
    argv = [*models, *files, *grid, "--out", tmp_path / "out"]

    def start(*more):
        assert tune.main([*map(str, argv), *more]) == 0
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        return capsys.readouterr().err.count("tokens/s"), report

    return start


@pytest.mark.parametrize("method", ["cdsl", "mtad"])
@pytest.mark.parametrize("content", ["a note", '{"prompt": "x"}\n', '{"key": {"prompt": 1}}\n'])
def test_a_file_of_rows_of_another_is_left_alone(tmp_path, capsys, content, method):
    grid = tmp_path / "grid.jsonl"
    grid.write_text(content)
    assert tune.main(["task.jsonl", "--out", str(tmp_path), "--method", method]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "grid.jsonl: line 1 is no result of this program" in line
    assert grid.read_text() == content


def test_a_line_that_was_cut_off_is_measured_again(tuning, tmp_path):
    assert tuning()[0] == 5
    grid = tmp_path / "out" / "grid.jsonl"
    grid.write_bytes(grid.read_bytes()[:-40])
    assert tuning()[0] == 1
    assert tuning()[0] == 0


def write_prompts(path, *texts):
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def test_rows_of_other_prompts_are_measured_again(tuning, tmp_path):
    """The file's name is the same; rows of the other file stay."""
    assert tuning()[0] == 5
    assert tuning()[0] == 0, "the same files"
    write_prompts(tmp_path / "validation.jsonl", "two", "three")
    num_measured, report = tuning()
    assert num_measured == 2
    assert [row["rows"] for row in report["grid"]] == [2]
    assert [row["texts"] for row in report["grid"]] == [["two"]]
    write_prompts(tmp_path / "test.jsonl", "four")
    num_measured, report = tuning()
    assert num_measured == 3
    assert [row["texts"] for row in report["test"]] == [["four"]] * 3
    # Of the same prompt the reference counts, too.
    lines = {"prompt": "four", "reference": "five"}
    (tmp_path / "test.jsonl").write_text(json.dumps(lines) + "\n")
    assert tuning()[0] == 3


def test_rows_of_another_reward_are_measured_again(tiny_pair_dirs, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tuned_reward", raising=False)
    args = parse("--target", tiny_pair_dirs[0], "--reward", "tuned_reward:one")
    target = sj.load(tiny_pair_dirs[0])
    measured = []

    def measure():
        measured.append(1)
        return made_up_measure(setting, Candidate("CDLH", "cdlh"))

    for value in (1.0, 1.0, 0.0):
        (tmp_path / "tuned_reward.py").write_text(f"def one(text):\n    return {value}\n")
        reward = rewards.combine(args.reward)
        prompts = [Prompt(0, 0, "p", [5], {"prompt": "p"})]
        setting = TuneSetting(target, None, reward, prompts, 4, 1, 0, (), None)
        rows = MeasuredRows(tmp_path / "grid.jsonl", args, setting, None)
        rows.get("cdlh", {}, measure)
    assert len(measured) == 2


@pytest.mark.parametrize("changed", ["target", "draft"])
def test_rows_of_other_weights_are_measured_again(tuning, tmp_path, changed):
    assert tuning()[0] == 5
    cfg, params = load_pretrained(tmp_path / changed)
    other = params | {"norm": {"weight": params["norm"]["weight"] * 1.01}}
    tokenizer = (tmp_path / changed / "tokenizer.json").read_text()
    save_pretrained(tmp_path / changed, cfg, other, tokenizer)
    assert tuning()[0] == 5


# --- what methods can draw with ------------------------------------------------------------------


def test_every_method_can_draw_at_its_default_points(target, draft):
    """With the default sampling, and with the defaults that the test table compares."""
    for name in tune.GRIDS:
        args = parse("--method", name, "--test", "test.jsonl")
        lossy.check_points(args, Context(target, draft), lossy.grid_points(args))


@pytest.mark.parametrize(
    ("argv", "width"),
    [
        ([], "20"),
        (["--top-k", "30"], "30"),
        (["--top-k", "5"], None),
        (["--temperature", "0"], None),
        (["--set", "width=40"], "40"),
        (["--grid", "width=30,40"], "20"),
    ],
)
def test_mtjd_has_as_many_beams_as_its_top_k(argv, width):
    assert dict(parse("--method", "mtjd", *argv).set).get("width") == width
    assert cdsl.method("mtjd").options["width"].default == tune.MTJD_WIDTH


@pytest.mark.slow
def test_mtjd_is_tuned(tiny_pair_dirs, tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", "one")
    pair = ["--target", tiny_pair_dirs[0], "--draft", tiny_pair_dirs[1]]
    files = [str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out")]
    options = ["--method", "mtjd", "--grid", "block=2", "--max-new-tokens", "4"]
    assert tune.main([*pair, *files, *options]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [row["options"]["width"] for row in report["grid"]] == [20]


@pytest.mark.parametrize("argv", [["--set", "width=8"], ["--grid", "width=64,8"]])
def test_what_cannot_be_drawn_is_refused_before_anything_is_timed(
    tiny_pair_dirs, tmp_path, monkeypatch, capsys, argv
):
    monkeypatch.setattr(lossy, "costs", None)  # it times passes
    write_prompts(tmp_path / "prompts.jsonl", "one")
    pair = ["--target", tiny_pair_dirs[0], "--draft", tiny_pair_dirs[1]]
    files = [str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out")]
    assert tune.main([*pair, *files, "--method", "mtjd", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the top_k=20 likeliest blocks, and width=8 beams find no more" in line
    assert not (tmp_path / "out" / "grid.jsonl").exists()


@pytest.fixture(scope="module")
def tuned(tiny_pair_dirs, tmp_path_factory):
    """The report of a tuning whose grid is one point."""
    home = tmp_path_factory.mktemp("tuned")
    task = {"prompt": "def walk(tree):", "constraints": ["yield", "tree"]}
    (home / "task.jsonl").write_text(json.dumps(task) + "\n")
    pair = ["--target", tiny_pair_dirs[0], "--draft", tiny_pair_dirs[1]]
    grid = ["--a-t", "0.3", "--r-t", "0.3", "--b", "0", "--set", "k=2", "--set", "d=2"]
    argv = [*pair, str(home / "task.jsonl"), "--out", str(home / "out"), *grid]
    assert tune.main([*map(str, argv), "--max-new-tokens", "6", "--measure", "regex:e"]) == 0
    return home / "out"


def test_tuning_compares_hard_and_ratio_acceptance_without_a_reward(tuned):
    """The columns and rows of the paper's Tables 7 and 8."""
    table = json.loads((tuned / "report.json").read_text())["speculative"]
    names = ["target, greedy", "draft, greedy", "speculative, hard", "speculative, ratio"]
    assert [row["name"] for row in table] == [*names, "speculative, ratio of sampled drafts"]
    target, draft, hard, ratio, sampled = table
    assert (target["target_calls_per_token"], target["draft_calls_per_token"]) == (1, 0)
    assert (draft["target_calls_per_token"], draft["draft_calls_per_token"]) == (0, 1)
    assert target["texts"] == hard["texts"], "greedy speculative decoding is lossless"
    assert hard["options"] == sampled["options"] == {"gamma": 3}
    assert ratio["draft_calls_per_token"] <= 3 * ratio["target_calls_per_token"]
    text = (tuned / "report.md").read_text()
    heads = "acceptance rate | draft calls/token | target calls/token | hard | soft, of all"
    assert "## Speculative decoding, γ = 3" in text and heads in text
    assert "| regex | all |" in text


def test_the_curves_have_both_kinds_of_acceptance(tuned):
    curves = json.loads((tuned / "report.json").read_text())["curves"]
    assert list(curves) == ["hard", "ratio"]
    assert {row["options"].get("accept") for row in curves["ratio"]} == {"ratio"}
    assert all(row["modelled_speedup"] > 0 for rows in curves.values() for row in rows)
    assert (tuned / "thresholds.png").stat().st_size > 0
