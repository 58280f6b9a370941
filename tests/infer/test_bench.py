"""infer.bench end to end on a tiny pair, the arithmetic of its figures, and transformers."""

import argparse
import dataclasses
import importlib.util
import io
import json
import os
import types
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import specjax as sj
from infer import programs, rescoring, timing, uncertainty
from infer.bench import (
    benchmark,
    cases,
    entropies,
    peers,
    pictures,
    questions,
    sweep_pictures,
    text_quality,
    timed_cases,
)
from infer.bench import commands as bench
from infer.bench.cases import Case
from infer.bench.peer_process import PeerJob
from infer.bench.peer_table import PEERS
from infer.bench.pictures import draw_costs
from infer.bench.predictions import add_expected, pass_widths
from infer.bench.report import NEAR_TIE, fastest, markdown, show
from infer.bench.rows import accepted_at_positions, add_quality, languages_of, make_rows
from infer.bench.sweep_pictures import draw_sweep
from infer.programs import MAP_LIMIT
from infer.prompts import PromptEncoder
from infer.reporting import pyplot
from specjax._util.errors import OptionError, PairError
from specjax.metrics import expected_block_efficiency, expected_speedup, perplexity, rates
from specjax.models import init_params, save_pretrained
from specjax.models.families.head_config import HeadConfig
from specjax.models.hf.read import load_config
from specjax.registry import AUTO, METHODS, Context, method
from support.running import run_main

GREEDY = sj.Sampling()


def run(capsys, *argv):
    return run_main(bench.main, capsys, *argv)


@pytest.fixture
def small(tiny_pair_dirs, tmp_path):
    """Arguments of a short run on the tiny pair; its prompts share one bucket."""
    target, draft = tiny_pair_dirs
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "def one(x):"}\n{"prompt": "def two(y):"}\n')
    return [
        "--target",
        target,
        "--draft",
        draft,
        "--prompts",
        file,
        "--max-new-tokens",
        6,
        "--methods",
        "speculative",
        "--set",
        "gamma=2",
    ]


@pytest.fixture
def short_curve(monkeypatch):
    """A short cost curve v(T): each number of tokens T compiles a program."""
    monkeypatch.setattr(timing, "CURVE", (1, 4))


def test_a_head_drafts_in_a_benchmark(small, short_curve, tmp_path, capsys):
    """The head's cost is measured. Entropies and KL are not: a head cannot score text alone."""
    target = load_config(Path(small[1]))
    cfg = HeadConfig.of(target, np.arange(0, target.vocab_size, 2), layer_ids=(0, 1))
    save_pretrained(tmp_path / "head", cfg, init_params(cfg, jax.random.key(2)))
    small[small.index("--draft") + 1] = tmp_path / "head"
    small[small.index("speculative")] = "mentored"
    code, out, _ = run(capsys, *small, "--repeats", 1, "--sampled-only", "--entropy", "--json")
    assert code == 0
    report = json.loads(out)
    assert np.isfinite(report["c"])
    row = report["rows"][1]
    assert row["kl"] == "n/a" and "draft_accepted" not in row and row["draft_calls"] > 0


@pytest.mark.parametrize("is_head", [True, False])
def test_a_peer_gets_no_head(tiny_pair_dirs, monkeypatch, is_head):
    target, draft = tiny_pair_dirs
    models = types.SimpleNamespace(), types.SimpleNamespace(is_head=is_head, source=str(draft))
    monkeypatch.setattr(benchmark, "load_models", lambda *_: models)
    args = argparse.Namespace(random_target=None, target=str(target), base=None, mesh=None)
    with benchmark.open_models(args) as opened:
        assert opened.sources == [str(target), None if is_head else str(draft)]


@pytest.mark.torch
def test_a_peer_decodes_beside_a_head_that_it_cannot_read(small, tmp_path, capsys):
    pytest.importorskip("torch")
    target = load_config(Path(small[1]))
    cfg = HeadConfig.of(target, np.arange(target.vocab_size), layer_ids=(0, 1))
    save_pretrained(tmp_path / "head", cfg, init_params(cfg, jax.random.key(2)))
    small[small.index("--draft") + 1] = tmp_path / "head"
    argv = ["--repeats", 1, "--greedy-only", "--no-curve", "--peer", "transformers", "--json"]
    code, out, _ = run(capsys, *small, *argv)
    assert code == 0
    (row,) = json.loads(out)["peers"]
    assert row["name"] == "transformers generate" and row["mismatches"] == []


def test_a_peer_has_as_many_threads_as_we_have_cores(target, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    args = argparse.Namespace(peer=["vllm"], quantize=None)
    models = benchmark.Models(target, None, ["model", None])
    setting = types.SimpleNamespace(target=target, prompts=[[1]], budget=4)
    (peer,) = benchmark._peers(args, models, setting, [], Path("scratch"))
    assert peer._job["threads"] == benchmark.machine()["cores"] == 2


def test_report_has_every_case_and_figure(small, short_curve, tmp_path, capsys):
    home = tmp_path / "out"
    code, out, _ = run(capsys, *small, "--repeats", 1, "--json", "--out", home)
    assert code == 0
    report = json.loads(out)
    cases = {(r["method"], r["mode"], r["batch_size"]) for r in report["rows"]}
    assert cases == {
        (m, s, 1) for m in ("autoregressive", "speculative") for s in ("greedy", "sampled")
    }
    for row in report["rows"]:
        assert row["tokens_per_second"] > 0 and row["first_token_ms"] > 0
        if row["method"] == "speculative":
            assert row["speedup"] > 0 and row["predicted_speedup"] > 0
            assert row["options"]["gamma"] == 2 and row["draft_calls"] > 0
        if row["mode"] == "greedy":
            assert row["mismatches"] == []
    assert list(report["v"]) == ["1", "3"]  # 3 = γ + 1 nodes; nothing wider is used
    assert report["v"]["1"] == 1 and np.isfinite(report["c"])
    assert set(report["machine"]) == {"device", "cpu", "cores", "jax", "python"}
    files = ["bench.json", "bench.md", "bench.png", "runs.jsonl"]
    assert sorted(p.name for p in home.iterdir()) == files
    assert json.loads((home / "bench.json").read_text()) == report
    assert (home / "bench.md").read_text() == markdown(report)
    assert all(0 <= row["pm"]["perplexity"] < row["perplexity"] for row in report["rows"])
    assert {"speedup", "acceptance_rate", "block_efficiency"} <= report["rows"][-1]["pm"].keys()


@pytest.mark.parametrize(
    ("info", "name"),
    [
        ("model name\t: AMD EPYC\nflags\t\t: fpu avx avx2 avx512f\n", "AMD EPYC, AVX-512"),
        ("model name\t: AMD EPYC\nflags\t\t: fpu avx avx2\n\nflags\t: none", "AMD EPYC, AVX2"),
        ("model name\t: Old\nflags\t\t: fpu\n", "Old"),
    ],
)
def test_a_processor_is_named_with_its_vectors(info, name):
    assert benchmark.processor_of(info) == name


def test_runs_are_shown_and_kept_before_the_next_begins(small, monkeypatch, tmp_path, capsys):
    """A benchmark that is stopped in its third run has kept two."""
    real = timed_cases.run_case
    calls = []

    def stopped(setting, case):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(case)
        return real(setting, case)

    monkeypatch.setattr(timed_cases, "run_case", stopped)
    code, out, err = run(capsys, *small, "--repeats", 2, "--greedy-only", "--out", tmp_path / "b")
    assert (code, out) == (130, "")
    kept = [json.loads(line) for line in (tmp_path / "b" / "runs.jsonl").read_text().splitlines()]
    assert [(run["method"], run["repeat"]) for run in kept] == [
        ("autoregressive", 0),
        ("speculative", 0),
    ]
    assert kept[0]["tokens"] == kept[1]["tokens"]
    assert sum(kept[0]["stats"]["emitted"]) == sum(map(len, kept[0]["tokens"]))
    for run_ in kept:
        shown = f"{run_['label']}, greedy, batch 1, repeat 1 of 2: {run_['tokens_per_second']:.1f}"
        assert shown in err


def test_no_curve_measures_and_predicts_nothing(small, tmp_path, capsys):
    arguments = ["--repeats", 1, "--greedy-only", "--json", "--no-curve", "--out", tmp_path / "b"]
    code, out, err = run(capsys, *small, *arguments)
    report = json.loads(out)
    assert code == 0 and "cost curve" not in err
    assert (report["v"], report["c"]) == ({}, None)
    assert all(row["predicted_speedup"] is None for row in report["rows"])
    assert "v(T)" not in markdown(report)


@pytest.mark.parametrize(
    ("pass_seconds", "steps", "timings"),
    [(1e-4, timing.STEPS, timing.TIMINGS), (0.1, timing.FEWEST_STEPS, timing.FEWEST_TIMINGS)],
)
def test_a_curve_is_measured_within_its_time(monkeypatch, pass_seconds, steps, timings):
    clock = [0.0]
    runs = []

    def run_loop(count):
        runs.append(count)
        clock[0] += count * pass_seconds

    monkeypatch.setattr(timing, "_round_loop", lambda models: run_loop)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    seconds = timing.round_seconds([["a"], ["b"]], budget=2.0)
    assert len(seconds) == timings and np.allclose(seconds, pass_seconds)
    assert runs[4:] == [steps] * 2 * timings  # after two to compile and two to find out


def test_bad_lines_are_skipped_and_the_rest_is_measured(small, short_curve, capsys):
    file = small[small.index("--prompts") + 1]
    long = json.dumps({"prompt": "word " * 4000})
    file.write_text(f"{long}\nnot json\n{file.read_text()}{long}\n")
    argv = [*small[:-4], "--methods", "autoregressive", "--greedy-only", "--repeats", 1, "--json"]
    argv += ["--mesh", "data=1"]
    code, out, err = run(capsys, *argv)
    assert code == 3 and json.loads(out)["prompts"] == 2 and json.loads(out)["skipped"] == 3
    reported = [line for line in err.splitlines() if f"{file} line" in line]
    assert [f"line {number}: " in line for number, line in zip((1, 2, 5), reported, strict=True)]
    assert "context holds" in reported[0] and "not JSON" in reported[1]
    # With one prompt asked for, later lines are not read. Without any prompt left, it is an error.
    asked = argparse.Namespace(prompts=str(file), num_prompts=1, dataset=None, run_tests=False)
    encoder = PromptEncoder(sj.load(small[1]))
    assert questions.read_questions(asked, encoder)[1] == 2
    file.write_text(f"{long}\n")
    with pytest.raises(OptionError, match="no prompt is left"):
        questions.read_questions(asked, encoder)
    capsys.readouterr()
    code, out, err = run(capsys, *argv)
    assert (code, out) == (3, "") and f"{file}: no prompt is left to measure" in err


@pytest.mark.torch
def test_transformers_is_timed_every_repeat_and_agrees(small, short_curve, capsys):
    pytest.importorskip("torch")
    code, out, _ = run(
        capsys, *small, "--greedy-only", "--repeats", 2, "--json", "--peer", "transformers"
    )
    assert code == 0
    rows = json.loads(out)["peers"]
    assert [(r["name"], r["ours"]) for r in rows] == [
        ("transformers generate", "autoregressive"),
        ("transformers assisted", "speculative"),
        ("transformers assisted-default", "speculative"),
    ]
    for row in rows:
        assert len(row["repeats"]) == 2 and len(row["per_prompt"]) == 2
        assert row["mismatches"] == []
        assert row["ratio"] > 0 and row["first_token_ms"] > 0


@pytest.mark.torch
def test_peer_failure_is_one_line_and_leaves_no_process(tmp_path):
    pytest.importorskip("torch")
    job = PeerJob(str(tmp_path), None, [[1]], 4, 2, [], 1, on_cpu=True, dtype="float32")
    peer = peers.Peer("transformers", job)
    with pytest.raises(OptionError, match="peer failed") as caught, peer:
        pass
    assert "\n" not in str(caught.value)
    assert peer._process.poll() is not None


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_is_not_installed_is_refused(monkeypatch, capsys, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    code, out, err = run(capsys, "--peer", name)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert PEERS[name].install in err


def scripted(tokens, decode, prefill):
    """A generation with given times per row."""
    counters = {n: np.array([8]) for n in ("rounds", "target_calls", "tested", "drafted")}
    counters |= {
        "accepted": np.array([6]),
        "emitted": np.array([16]),
        "draft_calls": np.array([16]),
        "accepted_hist": np.array([[2, 6]]),
    }
    return types.SimpleNamespace(
        passes=2,
        tokens=tokens,
        lengths=np.array([len(t) for t in tokens]),
        stats=counters,
        share_seconds=np.array(decode) + np.array(prefill),
        prefill_seconds=np.array(prefill),
        first_token_seconds=np.array(prefill),
        origins=[np.zeros(len(t), np.int8) for t in tokens],
        text=[""] * len(tokens),
    )


def test_rows_share_their_seconds_and_cases_are_interleaved(monkeypatch):
    """Three rows, batch size 2: prefill between the rounds of other rows counts as their time."""
    order = []

    def run_case(setting, case):
        order.append((case.method, setting.seed))
        tokens = [np.arange(4)] * 3
        return scripted(tokens, decode=[2.0, 2.0, 1.0], prefill=[1.0, 1.0, 2.0])

    monkeypatch.setattr(timed_cases, "run_case", run_case)
    monkeypatch.setattr(timed_cases, "warm_up", lambda setting, case: order.append(case.method))
    both = [Case(name, {}, GREEDY, 2) for name in ("autoregressive", "speculative")]
    setting = timed_cases.BenchSetting(None, None, [[1]] * 3, 4, seed=5)
    first, _ = timed_cases.measure(setting, both, 2, order.append)
    assert first.tokens_per_second().tolist() == [12 / 9, 12 / 9]
    tokens, seconds = first.speed()
    assert tokens.tolist() == [[4, 4, 4]] * 2 and seconds.tolist() == [[3, 3, 3]] * 2
    single = dataclasses.replace(first, case=dataclasses.replace(first.case, batch_size=1))
    assert single.speed()[1].tolist() == [[2, 2, 1]] * 2
    np.testing.assert_array_equal(single.speed(whole=True)[1], seconds)
    first_repeat, second_repeat = (
        [("autoregressive", seed), ("speculative", seed)] for seed in (5, 6)
    )
    plain, other = first_repeat
    assert order == ["autoregressive", plain, "speculative", other, 0, *second_repeat, 1]


def test_a_row_has_the_share_of_rounds_that_accept_at_each_position():
    assert accepted_at_positions([2, 1, 0, 1]) == [0.5, 0.25, 0.25]
    assert accepted_at_positions([3]) == [] == accepted_at_positions([0, 0])


@pytest.mark.slow
def test_cases_make_room_for_each_other(monkeypatch):
    """With few memory maps allowed, programs of earlier cases are dropped."""
    compiled = []
    counts = []

    def warm_up(setting, case):
        compiled.append(case.batch_size)
        grown = [jnp.sort(jnp.ones((2, 3 + case.batch_size)) * n, axis=n) for n in range(2)]
        jax.block_until_ready(grown)

    def run_case(setting, case):
        counts.append(programs.maps())
        return scripted([np.arange(4)], decode=[1.0], prefill=[1.0])

    monkeypatch.setattr(timed_cases, "warm_up", warm_up)
    monkeypatch.setattr(timed_cases, "run_case", run_case)
    both = [Case("autoregressive", {}, GREEDY, size) for size in range(1, 9)]
    setting = timed_cases.BenchSetting(None, None, [[1]], 4)
    timed_cases.measure(setting, both, 2)
    assert compiled == [*range(1, 9)] and counts[:8] == sorted(counts[:8]), "all are kept"
    room = counts[4] - counts[0]
    compiled.clear()
    counts.clear()
    jax.clear_caches()
    monkeypatch.setattr(programs, "SHARE", (programs.maps() + room) / int(MAP_LIMIT.read_text()))
    timed_cases.measure(setting, both, 2)
    assert len(compiled) == 16, "dropped programs are compiled again before they are timed"
    assert max(counts) < min(counts) + 2 * room


def compilations(work):
    """How many programs ``work`` compiles, or loads from the compilation cache."""
    seen = []

    def listen(event, *_, **__):
        seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        work()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return sum(event.endswith("backend_compile_duration") for event in seen)


def test_no_time_includes_a_compilation(target):
    """Prompts with three sizes of prefill chunk, whose rows end early or outgrow a bucket."""
    prompts = [list(range(1, n + 1)) for n in (3, 60, 9, 62, 61)]
    # An EOS that some rows soon emit, but no row of the warmup.
    emitted = sj.generate(target, prompts[1:2], max_new_tokens=8).tokens[0][4]
    ending = dataclasses.replace(target, eos_ids=(int(emitted),))
    setting = timed_cases.BenchSetting(ending, None, prompts, 80)
    case = Case("autoregressive", {}, sj.Sampling(0.9), 2)
    assert compilations(lambda: timed_cases.warm_up(setting, case)) > 0
    runs = []

    def timed():
        for seed in range(3):
            runs.append(timed_cases.run_case(dataclasses.replace(setting, seed=seed), case))

    assert compilations(timed) == 0
    ends = [run.lengths + run.prompt_tokens for run in runs]
    assert min(run.lengths.min() for run in runs) < 80 and np.max(ends) > 128


def test_each_repeat_draws_with_the_next_seed(target, draft):
    case = Case("speculative", method("speculative").resolve({}), sj.Sampling(1.0), 1)
    results = [
        timed_cases.measure(timed_cases.BenchSetting(target, draft, [[1, 2]], 8, seed), [case], 2)[
            0
        ]
        for seed in (0, 1)
    ]
    tokens = [[run.tokens[0].tolist() for run in result.distinct_runs] for result in results]
    assert tokens[0][0] != tokens[0][1] == tokens[1][0]


def result(name, speeds, tokens, sampling=GREEDY, **options):
    """The result of a case at batch size 1, with a speed per repeat and ``tokens`` per prompt."""
    runs = []
    for speed in speeds:
        seconds = [len(t) / speed for t in tokens]
        run = scripted(tokens, seconds, seconds)
        run.stats = {n: np.repeat(v, len(tokens), axis=0) for n, v in run.stats.items()}
        runs.append(run)
    return timed_cases.Result(Case(name, options, sampling, 1), runs)


def test_rows_compare_within_a_repeat_and_predict(target):
    """A machine that halves its speed between repeats does not change the speedup."""
    plain = np.array([5, 6])
    other = np.array([5, 7])
    results = [
        result("autoregressive", [100.0, 50.0, 10.0], [plain]),
        result("speculative", [200.0, 100.0, 20.0], [other], gamma=3),
    ]
    base, row = make_rows(target, [[1, 2]], results, {1: 1.0, 4: 1.2}, 0.1)
    assert base["speedup"] is None and base["predicted_speedup"] is None
    assert row["speedup"] == pytest.approx(2.0)
    assert row["pm"] == {}, "one prompt shows no spread"
    expected = expected_speedup(0.75, 3, 0.1, 1.2)
    assert row["predicted_speedup"] == row["expected_speculative"] == pytest.approx(expected)
    assert row["expected_scd_paper"] == pytest.approx(expected * 1.5 / (1.5 + 0.1 * 0.75**3))
    assert row["expected_scd"] == pytest.approx(expected * 1.5 / 1.6)
    assert row["draft_calls_per_token"] == 1 and row["target_calls_per_token"] == 0.5
    assert row["measured_over_predicted"] == pytest.approx(2 / expected)
    (mismatch,) = row["mismatches"]
    assert (mismatch["row"], mismatch["position"]) == (0, 1) and mismatch["gap"] > NEAR_TIE


@pytest.mark.parametrize(
    ("method", "options", "passes"),
    [
        ("sdsat", {"k": 3, "form": "auto"}, (4, 4)),
        # k = 0 means the trained window of the model, here 4.
        ("sdsat", {"k": 0, "form": "tree"}, (5, 1 + 4 + 8 + 8 + 5)),
        ("sdsat-single", {"k": 3, "groups": 0}, (16,)),
        ("sdsat-single", {"k": 3, "groups": 2}, (4 + 6,)),
    ],
)
def test_speedup_of_self_drafting_is_predicted_from_its_passes(target, method, options, passes):
    """Two tokens per round; each pass costs the measured v of its number of tokens."""
    tokens = np.array([5, 6])
    results = [
        result("autoregressive", [100.0], [tokens]),
        result(method, [150.0], [tokens], **options),
    ]
    assert pass_widths(results[1].case, target) == passes
    v = {1: 1.0} | {width: 1 + width / 100 for width in passes}
    row = make_rows(target, [[1, 2]], results, v, None)[1]
    expected = 2 / sum(v[width] for width in passes)
    assert row["predicted_speedup"] == pytest.approx(expected)
    assert row["measured_over_predicted"] == pytest.approx(1.5 / expected)


def test_quality_counts_every_seed_of_a_sampled_row_and_one_of_a_greedy(target):
    """Three prompts and two repeats; counters and lengths differ by prompt and seed."""
    rows = {}
    for sampling in (GREEDY, sj.Sampling(1.0)):
        tokens = [np.array([5, 6, 5, 6, 5]), np.array([7, 8, 9, 1]), np.array([2, 2])]
        one = result("autoregressive", [100.0, 50.0], tokens, sampling)
        for run, accepted in zip(one.runs, ([6, 2, 1], [0, 2, 5]), strict=True):
            run.stats["accepted"] = np.array(accepted)
        rows[one.case.mode] = make_rows(target, [[1], [2], [3]], [one], {}, None)[0]
    assert rows["greedy"]["acceptance_rate"] == 9 / 24
    assert rows["sampled"]["acceptance_rate"] == 16 / 48
    assert rows["sampled"]["counters"]["accepted"] == 16
    assert rows["greedy"]["pm"]["acceptance_rate"] > rows["sampled"]["pm"]["acceptance_rate"]
    # An output that is too short has no diversity and does not count.
    assert rows["greedy"]["diversity"] == rows["sampled"]["diversity"]
    assert rows["greedy"]["diversity"] == pytest.approx((1 / 2 * 2 / 3 * 1 + 1) / 2)


def test_means_over_prompts_stand_beside_ratios_of_sums(target):
    """A long completion weighs more in a ratio of sums. A prompt without a draft has no rate."""
    tokens = [np.array([5, 6, 5, 6, 5, 6]), np.array([7, 8]), np.array([2, 2])]
    one = result("autoregressive", [100.0], tokens)
    (run,) = one.runs
    run.stats["accepted"] = np.array([6, 1, 0])
    run.stats["drafted"] = np.array([12, 8, 0])
    run.share_seconds = np.array([0.06, 0.1, 0.01])
    run.prefill_seconds = np.zeros(3)
    row = make_rows(target, [[1], [2], [3]], [one], {}, None)[0]
    assert row["accept_rate_per_draft"] == 7 / 20
    assert row["accept_rate_per_draft_of_prompt"] == (6 / 12 + 1 / 8) / 2
    assert row["tokens_per_second"] == pytest.approx(10 / 0.17)
    assert row["tokens_per_second_of_prompt"] == pytest.approx((100 + 20 + 200) / 3)
    assert row["pm"]["accept_rate_per_draft_of_prompt"] > 0


def test_infilling_is_scored_by_language(target):
    """SDSAT, Tables 3 and 7 have a column for each language."""
    one = result("autoregressive", [100.0], [np.array([5]), np.array([6]), np.array([7])])
    one.runs[0].text = ["a = 1", "a = 2", "a = 3"]
    tasks = [("py", "a = 1"), ("js", "a = 0"), ("py", "a = 9")]
    asked = [
        questions.Question([1], task={"language": language, "suffix": "", "middle": middle})
        for language, middle in tasks
    ]
    rows = make_rows(target, [[1]] * 3, [one], {}, None)
    add_quality(rows, target, None, asked, [one])
    assert rows[0]["exact_match"] == pytest.approx(1 / 3)
    assert (rows[0]["exact_match_js"], rows[0]["exact_match_py"]) == (0, 0.5)
    assert languages_of(asked) == ["js", "py"] and languages_of(asked[::2]) == []


def test_a_ratio_is_of_sums_and_its_interval_is_the_normal_one():
    """The interval agrees with the delta method: 200 prompts, two seeds each, unequal sums."""
    drawing = np.random.default_rng(0)
    below = drawing.integers(20, 60, 200)
    above = drawing.binomial(below, drawing.beta(8, 3, 200))
    value, half_width = uncertainty.ratio(above, below)
    assert value == above.sum() / below.sum()
    error = np.sqrt(np.sum((above - value * below) ** 2)) / below.sum()
    assert half_width == pytest.approx(1.96 * error, rel=0.1)
    assert uncertainty.ratio(above, below) == (value, half_width), "the same every time"
    log_value, log_half = uncertainty.ratio(above, below, np.log)
    assert log_value == pytest.approx(np.log(value))
    assert log_half == pytest.approx(half_width / value, rel=0.05)
    assert uncertainty.ratio(np.zeros(3), np.zeros(3)) == (None, None)
    assert uncertainty.ratio(np.ones(1), np.ones(1)) == (1, None)


def test_a_speed_ratio_pairs_prompts_and_repeats():
    """A slow prompt or repeat slows both sides, so it does not widen the interval."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(10, 40, (3, 40)).astype(float)
    slow = generator.lognormal(0, 1, 40) * np.array([[1.0], [5.0], [2.0]])
    ours = (tokens, tokens * slow / 2)
    theirs = (tokens, tokens * slow)
    value, half_width = uncertainty.speed_ratio(ours, theirs)
    assert value == pytest.approx(2) and half_width < 1e-9
    noisy = tokens, tokens * slow * generator.lognormal(0, 0.2, (3, 40))
    assert 0.02 < uncertainty.speed_ratio(ours, noisy)[1] < 0.5


def test_sweep_runs_the_method_at_each_value(small, short_curve, tmp_path, capsys):
    home = tmp_path / "out"
    code, out, _ = run(
        capsys,
        *small,
        "--repeats",
        1,
        "--json",
        "--out",
        home,
        "--greedy-only",
        "--sweep",
        "gamma=1..2",
    )
    assert code == 0
    rows = json.loads(out)["rows"]
    assert [row["label"] for row in rows] == [
        "autoregressive",
        "speculative gamma=1",
        "speculative gamma=2",
    ]
    assert all(row["perplexity"] > 1 and 0 < row["diversity"] <= 1 for row in rows)
    assert rows[0]["perplexity"] == rows[1]["perplexity"], "lossless: the same text"
    assert (home / "sweep.png").stat().st_size > 10_000
    # A later run takes the values of the last --sweep, and shows the first run beside its own.
    more = ["--sweep", "gamma=1,3", "--sweep", "gamma=2", "--plot", "accepted/drafted"]
    argv = [*small, "--repeats", 1, "--sampled-only", *more, "--beside", home, "--json"]
    code, out, err = run(capsys, *argv)
    assert code == 0, err
    report = json.loads(out)
    assert report["sweep"] == ["gamma"] and report["plot"] == {
        "accept_rate_per_draft": "accepted/drafted"
    }
    assert [row["label"] for row in report["rows"]] == ["autoregressive", "speculative gamma=2"]
    assert {row["temperature"] for row in report["rows"]} == {0.8}
    (beside,) = report["beside"]
    assert beside["rows"] == rows and beside["data"] == report["data"] == "prompts.jsonl"
    assert len(fastest(report)) == 2


@pytest.mark.parametrize("option", [("--plot", "speedup"), ("--beside", "runs")])
def test_options_of_the_sweeps_picture_need_a_sweep(small, capsys, option):
    code, _, err = run(capsys, *small, *option)
    assert code == 2 and "give --sweep, too" in err


@pytest.mark.parametrize("text", ["gamma", "gamma=", "gamma=a..b", "gamma=3..1", "gamma=1,,2"])
def test_a_bad_sweep_is_one_line(small, capsys, text):
    code, _, err = run(capsys, *small, "--sweep", text)
    assert code == 2 and text in err and len(err.strip().splitlines()) == 1


def test_output_logprobs_are_the_unwarped_targets(target):
    prompts = [[1, 2, 3], [4]]
    out = sj.generate(target, prompts, max_new_tokens=9, logprobs=True)
    for prompt, tokens, want in zip(prompts, out.tokens, out.logprobs, strict=True):
        got = rescoring.output_logprobs(target, prompt, tokens)
        np.testing.assert_allclose(got, want, atol=1e-4)


def test_greedy_differences_are_distinguished_from_near_ties():
    row = {
        "method": "speculative",
        "label": "speculative",
        "mode": "greedy",
        "batch_size": 1,
        "tokens_per_second": 1.0,
        "perplexity": 2.5,
        "pm": {"perplexity": 0.125},
        "mismatches": [{"gap": 1e-6}, {"gap": 0.5}],
    }
    where = {"device": "d", "cpu": "c", "cores": 1, "jax": "j"}
    report = {
        "machine": where,
        "target": "t",
        "draft": "d",
        "prompts": 9,
        "repeats": 2,
        "seed": 7,
        "mesh": {"data": 2, "model": 1},
        "max_new_tokens": 4,
        "rows": [row],
        "metrics": {},
        "peers": [],
        "v": {"1": 1.0},
        "c": 0.1,
        "energy": None,
        "cost": [],
        "sweep": [],
    }
    says = "2 of 9 greedy outputs differ from plain decoding, 1 of them not at a near-tie"
    assert says in markdown(report)
    console = Console(width=80, record=True, file=io.StringIO())
    show(report, console)
    text = " ".join(console.export_text().split())
    assert says in text
    assert "speculative" in text and "…" not in text
    assert "2.50 ± 0.12" in text and "| 2.50 ± 0.12 |" in markdown(report)
    assert "9 prompts × 2 seeds from 7" in text and "data=2,model=1" in text


def test_settings_reach_one_method_or_all():
    spec = method("speculative")
    assert cases.options_of(spec, {"gamma": "3"}) == {"gamma": "3"}
    assert cases.options_of(spec, {"gamma": "3", "speculative.gamma": "5"}) == {"gamma": "5"}
    assert cases.options_of(spec, {"other.gamma": "5"}) == {}


def test_default_prompts_are_held_out_functions(tiny_pair_dirs):
    args = argparse.Namespace(prompts=None, num_prompts=3, run_tests=False)
    target = sj.load(tiny_pair_dirs[0])
    asked, skipped = questions.read_questions(args, PromptEncoder(target))
    assert len(asked) == 3 and skipped == 0
    for question in asked:
        assert "def " in target.tokenizer.decode(question.tokens)
        assert question.references[0].startswith("\n    ")


def test_random_target_is_what_a_peer_loads(monkeypatch):
    monkeypatch.setitem(bench.SIZES, "tiny", (32, 2, 4, 48, 97))
    args = argparse.Namespace(random_target="tiny", dtype=None, quantize=None, num_prompts=3)
    args.pass_width = 4
    args.cache_dtype = "int8"
    with benchmark.open_models(args) as (target, draft, sources):
        asked, _ = questions.read_questions(args, PromptEncoder(target))
    assert draft is None and sources[1] is None
    assert target.config.vocab_size == 97 and len(asked) == 3
    assert (target.pass_width, target.cache_dtype) == (4, "int8")
    assert all(5 <= token < 97 for question in asked for token in question.tokens)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--methods", "nope"], "nope"),
        (["--set", "gama=3"], "gama"),
        (["--set", "speculative.gama=3"], "gama"),
        (["--set", "nope.gamma=3"], "nope.gamma"),
        (["--batch-size", "0"], "--batch-size"),
        (["--repeats", "0"], "--repeats"),
        (["--peer", "tgi"], "transformers, llama.cpp, vllm"),
        (["--temperature", "-1"], "temperature"),
        (["--run-tests"], "--prompts"),
        (["--unsafe"], "--run-tests"),
        (["--sampled-only", "--temperature", "0"], "--sampled-only"),
        (["--seed", 2**64 - 2, "--repeats", "3"], "--seed 18446744073709551614"),
        (["--mesh", "data=4096"], "needs 4096 devices"),
        (["--mesh", "model=4096"], "needs 4096 devices"),
        (["--chat"], "no chat template"),
    ],
)
def test_bad_arguments_are_one_line(tiny_pair_dirs, capsys, argv, says):
    target, draft = tiny_pair_dirs
    code, out, err = run(capsys, "--target", target, "--draft", draft, "--num-prompts", 1, *argv)
    assert (code, out) == (2, "")
    assert says in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "sweep", [["gamma=1..999999999"], ["gamma=1..1001"], ["tau=0,0.5", "gamma=1..501"]]
)
def test_a_sweep_of_more_values_than_anyone_measures(capsys, sweep):
    """The first one took 3.6 GB."""
    options = [f"--sweep={values}" for values in sweep]
    code, _, err = run(capsys, "--methods", "mtad", "--prompts", "none", *options)
    (line,) = err.splitlines()
    assert code == 2 and "at most 1000" in line


def test_a_report_is_written_if_it_cannot_be_shown(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "make_report", lambda args, directory: {"skipped": 0})
    monkeypatch.setattr(benchmark, "markdown", lambda report: "text")
    written = []
    monkeypatch.setattr(benchmark, "_write", lambda *args: written.append(args))
    args = argparse.Namespace(out=str(tmp_path), json=False)
    for error in (OSError(28, "No space left on device"), BrokenPipeError()):
        with monkeypatch.context() as patched, pytest.raises(type(error)):
            patched.setattr(benchmark, "_show", Mock(side_effect=error))
            benchmark.run_benchmark(args)
    assert written == [(tmp_path, {"skipped": 0})] * 2


def test_random_target_of_an_unknown_size(capsys):
    code, _, err = run(capsys, "--random-target", "9t")
    assert code == 2 and "100m" in err


@pytest.mark.parametrize("dtype", ["int4", "float64", "bf16", "1,", "9" * 5000, "\udcc3"])
def test_random_target_of_an_unknown_dtype_is_one_line(capsys, dtype):
    code, out, err = run(capsys, "--random-target", "100m", "--dtype", dtype)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"dtype {ascii(dtype)[:40]}" in err and "is not supported; choose float32" in err


def test_unusable_output_directory_is_found_before_measuring(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, out, err = run(capsys, "--target", "nowhere", "--out", tmp_path / "file")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--out" in err


@pytest.mark.parametrize("content", ["a note", '{"label": "x"}\n{"prompt": "x"}\n', "[]\n"])
def test_a_file_of_runs_of_another_is_left_alone(small, tmp_path, capsys, content):
    """It would be emptied before anything is measured."""
    (tmp_path / "runs.jsonl").write_text(content)
    code, out, err = run(capsys, *small, "--out", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    number = content.count("\n", 0, -1) + 1
    assert f"runs.jsonl: line {number} is no result of this program" in err
    assert (tmp_path / "runs.jsonl").read_text() == content


def test_rates_and_cost_model():
    counters = {
        "accepted": 6,
        "tested": 8,
        "drafted": 12,
        "emitted": 10,
        "rounds": 4,
        "target_calls": 4,
    }
    assert rates(counters) == {
        "acceptance_rate": 0.75,
        "accept_rate_per_draft": 0.5,
        "draft_length": 3.0,
        "block_efficiency": 2.5,
        "tokens_per_target_call": 2.5,
    }
    assert rates(dict.fromkeys(counters, 0))["acceptance_rate"] is None
    assert expected_block_efficiency(0.5, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert expected_block_efficiency(1.0, 3) == 4
    assert expected_speedup(0.5, 3, c=0.1, v=1.2) == pytest.approx(1.875 / 1.5)
    assert perplexity([]) is None
    assert perplexity([-1.0, -3.0]) == pytest.approx(7.389056)


# --- every option ----------------------------------------------------------------------------


def unusual_values(option):
    """Values of an option that the others do not stand for: words, choices, flags, bounds."""
    values = [*option.words, *option.choices]
    if option.kind is bool:
        values += [True, False]
    elif option.kind is int:
        values += [option.low, min(option.high, 5)]
    return values


def unusual_cases(target, draft):
    """A case of every method for each of its options' unusual values that fits the pair."""
    for name, spec in METHODS.items():
        if spec.needs_reward:
            continue
        settings = [{}] + [
            {option: value}
            for option, about in spec.options.items()
            for value in unusual_values(about)
        ]
        for given in settings:
            for sampling in (GREEDY, sj.Sampling(0.8)):
                context = Context(target, draft, greedy=sampling == GREEDY)
                try:
                    options = spec.resolve(given)
                    spec.build(context, options)
                except (OptionError, PairError):
                    continue
                yield Case(name, options, sampling, 1)


def test_the_figures_of_a_bench_take_every_option_of_every_method(target, draft, monkeypatch):
    """Figures come after all measuring, so an option that breaks one costs the whole run."""
    entropy = np.ones(512)
    monkeypatch.setattr(entropies, "_entropies", lambda net, row: entropy[: row.shape[1]])
    monkeypatch.setattr(text_quality, "_token_kl", lambda mesh, net, draft, row, *_: entropy)
    v = {count: 1.0 + count / 10 for count in range(1, 1200)}
    tokens = np.arange(6)
    seen = set()
    drawn = {}
    for case in unusual_cases(target, draft):
        made = result(case.method, [10.0], [tokens], case.sampling, **case.options)
        plain = result("autoregressive", [5.0], [tokens], case.sampling)
        rows = make_rows(target, [[1, 2]], [plain, made], v, 0.1)
        add_expected(rows, [0.05])
        entropies.add_entropies(rows, target, draft, [[1, 2]], [plain, made])
        text_quality.kl_to_target(target, draft, [[1, 2]], made)
        seen.add((case.method, *(str(value) for value in case.options.values())))
        drawn.setdefault(case.method, []).extend(rows)
    assert len({name for name, *_ in seen}) > 15 and any(AUTO in values for values in seen)

    for module in (pictures, sweep_pictures):
        monkeypatch.setattr(module, "save_figure", lambda figure, _: pyplot().close(figure))
    num_mixed = 0
    for name, rows in drawn.items():
        report = {"target": "t", "data": "d", "rows": rows, "beside": [], "cost": [0.05]}
        for option in METHODS[name].options:
            own = [row for row in rows if option in row["options"]]
            if len({type(row["options"][option]) for row in own}) > 1:
                num_mixed += 1
                swept = report | {"sweep": [option], "plot": {"tokens_per_second": "tokens/s"}}
                draw_sweep(None, swept)
                if any("expected_at_0.05" in row for row in rows):
                    draw_costs(None, swept)
    assert num_mixed > 5
