"""What infer.bench reports of a method's output: KL to the target, energy, and pass@1."""

import json
import types

import numpy as np
import pytest

import specjax as sj
from infer.bench import commands as bench
from infer.bench import energy, questions
from infer.bench.cases import Case
from infer.bench.report import COLUMNS
from infer.bench.rows import make_rows
from infer.bench.text_quality import LOSSLESS, UNKNOWN, kl_to_target, was_tested
from infer.bench.timed_cases import Result
from infer.reporting import fill
from specjax.core.types import FROM_DRAFT, FROM_TARGET
from support.scripted import ids_of, save_writer, strip_tokenizer

PROMPTS = [[1, 2, 3], [4], [7, 7, 5]]
SAMPLED = sj.Sampling(0.8, 0, 0.9)

# --- KL to the target ------------------------------------------------------------------------


def decoded(target, draft, method, options=None):
    """A method's generation as the benchmark keeps it."""
    spec = sj.method(method)
    values = spec.resolve(options or {})
    out = sj.generate(
        target,
        PROMPTS,
        method=method,
        draft=draft,
        options=values,
        sampling=SAMPLED,
        max_new_tokens=20,
    )
    return Result(Case(method, values, SAMPLED, 3), [out])


@pytest.mark.slow
def test_kl_of_mentored_decoding_is_what_its_bound_allows(target, draft):
    divergence = {}
    for bound in (0.0, 0.02, 0.2):
        result = decoded(target, draft, "mentored", {"max_kl": bound, "gamma": 2})
        sums, counts = kl_to_target(target, draft, PROMPTS, result)
        assert counts.tolist() == [20] * 3
        divergence[bound] = sums.sum() / counts.sum()
        origins = result.runs[0].origins
        tested = np.concatenate([was_tested(origin, 2) for origin in origins]).mean()
        assert 0.3 < tested < 1
        # A bonus token adds no KL, and every tested token at most D.
        assert divergence[bound] <= bound * tested + 1e-6
    assert divergence[0.0] == 0 < divergence[0.02] < divergence[0.2]
    assert divergence[0.02] > 0.005, "most positions use the bound up"


def test_kl_is_exact_or_unknown_elsewhere(target, draft):
    for method, options, want in (
        ("speculative", {}, LOSSLESS),
        ("lookup", {}, LOSSLESS),
        ("scd", {}, UNKNOWN),  # lossless for the contrastive distribution, not for the target's
        ("bild", {}, UNKNOWN),
        ("mentored", {"stop": "before"}, UNKNOWN),
    ):
        case = Case(method, sj.method(method).resolve(options), SAMPLED, 3)
        assert kl_to_target(target, draft, PROMPTS, Result(case)) == want


def test_perplexity_is_over_tokens_and_the_mean_of_rows(target, monkeypatch):
    """Rows of 1, 2 and 3 nats a token: exp(2) over all, and the mean of the three exponentials."""
    nats = {1: 3.0, 4: 2.0, 7: 1.0}  # by the prompt's first token

    def output_logprobs(model, prompt, output):
        return np.full(len(output), -nats[prompt[0]])

    monkeypatch.setattr("infer.bench.rows.output_logprobs", output_logprobs)
    result = decoded(target, None, "autoregressive")
    (row,) = make_rows(target, PROMPTS, [result], {1: 1.0}, None)
    assert row["perplexity"] == pytest.approx(np.exp(2))
    assert row["perplexity_of_rows"] == pytest.approx(np.exp([1, 2, 3]).mean())
    heads, _ = fill(COLUMNS, [row])
    assert {"perplexity", "perplexity, mean of rows"} <= set(heads)


def test_bonus_tokens_are_distinguished_from_corrections():
    d, t = FROM_DRAFT, FROM_TARGET
    # γ = 2: two accepted and a bonus; one accepted and a correction; a correction; cut short.
    origin = np.array([d, d, t, d, t, t, d])
    assert was_tested(origin, 2).tolist() == [True, True, False, True, True, True, True]


# --- energy ----------------------------------------------------------------------------------


def powercap(root, **counters):
    """A tree of files as Linux has it; ``counters`` in microjoules, one per package."""
    for name, value in counters.items():
        home = root / name.replace("_", ":").replace("rapl", "intel-rapl")
        home.mkdir(exist_ok=True)
        (home / "name").write_text("core\n" if name.count("_") == 2 else "package-0\n")
        (home / "energy_uj").write_text(f"{value}\n")
        (home / "max_energy_range_uj").write_text("10000000\n")


def test_rapl_sums_packages_and_survives_a_wrap(tmp_path):
    powercap(tmp_path, rapl_0=9_000_000, rapl_1=1_000_000, rapl_0_0=5)
    meter = energy.Rapl.find(tmp_path)
    assert meter.joules() == 0
    powercap(tmp_path, rapl_0=9_500_000, rapl_1=1_250_000, rapl_0_0=7_000_000)
    assert meter.joules() == 0.75
    powercap(tmp_path, rapl_0=500_000)  # the counter wrapped at 10 J: one joule more
    assert meter.joules() == 1.75


def test_without_a_counter_there_is_no_number(tmp_path):
    assert energy.Rapl.find(tmp_path) is None
    powercap(tmp_path, rapl_0=1)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()  # as if the user may not read it
    assert energy.Rapl.find(tmp_path) is None
    assert energy.find_meter("tpu") is None
    heads, cells = fill(COLUMNS, [{"label": "x", "joules_per_token": UNKNOWN}])
    assert (heads, cells) == (["method", "J/token"], [["x", "n/a"]])


def test_nvml_reads_the_visible_gpus(monkeypatch):
    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetHandleByUUID=lambda u: 2,
        nvmlDeviceGetTotalEnergyConsumption=lambda i: 1500 * (i + 1),
    )
    for named, joules in (("", 9.0), ("1", 3.0), ("0,GPU-abc", 6.0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert energy.Nvml(nvml).joules() == joules


# --- pass@1 ----------------------------------------------------------------------------------

TASK = {
    "prompt": "def double(x):\n",
    "entry_point": "double",
    "test": "def check(f):\n    assert f(4) == 8\n    assert f(0) == 0\n",
}
WRONG = "def check(f):\n    assert f(4) == 9\n"


def test_bench_runs_tests_only_when_asked(tiny_pair_dirs, tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(
        "infer.bench.metrics.passing.passing", lambda *args: ran.append(args) or [True]
    )
    monkeypatch.setattr("infer.timing.CURVE", (1,))
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(TASK | {"task_id": "t/0", "reference": "    return x"}) + "\n")
    argv = [
        "--target",
        tiny_pair_dirs[0],
        "--prompts",
        str(file),
        "--max-new-tokens",
        "4",
        "--methods",
        "autoregressive",
        "--greedy-only",
        "--repeats",
        "1",
        "--json",
    ]
    for more, count in (([], 0), (["--run-tests", "--metric", "exact"], 1)):
        assert bench.main([*argv, *more]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert len(ran) == count and row.get("pass_at_1") == (1 if count else None)
        assert row["exact_match"] == (0 if count else None)
        assert row["rouge_l"] is not None and row["kl"] == LOSSLESS
        assert row["joules_per_token"] == UNKNOWN or row["joules_per_token"] > 0
        assert row["target_calls_per_token"] == 1


def test_a_right_answer_passes_whatever_spaces_the_decoder_strips(tmp_path, capsys):
    """It is indented by four spaces, the first of which a decoder of Llama 2's kind would strip."""
    words = ("▁▁▁▁", "return", "▁x", "▁*", "▁2")
    tokenizer = strip_tokenizer(*words)
    (eos,) = ids_of(tokenizer, "</s>")
    # It follows the prompt's last token, a line break.
    save_writer(tmp_path / "model", tokenizer, ids_of(tokenizer, "<0x0A>", *words), eos)
    tasks = [TASK | {"task_id": "right"}, TASK | {"task_id": "wrong", "test": WRONG}]
    rows = {}
    for task in tasks:
        file = tmp_path / f"{task['task_id']}.jsonl"
        file.write_text(json.dumps(task) + "\n")
        asked = ["--target", str(tmp_path / "model"), "--prompts", str(file), "--no-curve"]
        asked += ["--methods", "autoregressive,lookup", "--greedy-only", "--repeats", "1"]
        asked += ["--max-new-tokens", "20", "--run-tests", "--unsafe", "--json"]
        assert bench.main(asked) == 0
        found = json.loads(capsys.readouterr().out)["rows"]
        rows[task["task_id"]] = [row["pass_at_1"] for row in found]
    assert rows == {"right": [1, 1], "wrong": [0, 0]}


def test_references_of_every_format():
    assert questions.references_of({"prompt": "p", "reference": "a"}) == ("a",)
    assert questions.references_of({"prompt": "p", "references": ["a", "b"]}) == ("a", "b")
    # Spec-Bench: one reference per turn; the first turn is the prompt.
    assert questions.references_of({"turns": ["p", "r"], "reference": ["a", "b"]}) == ("a",)
    assert questions.references_of({"prompt": "p"}) == ()
