"""train.demo.models: stages fit together, finished ones are kept, stopped ones resume."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import specjax as sj
from specjax._util.errors import InputError
from support.training import ROOT
from train.config import HeadRunConfig, LMConfig, SDSATConfig, from_toml
from train.demo import models

CONFIGS = {"train.lm": LMConfig, "train.sdsat": SDSATConfig, "train.head": HeadRunConfig}
NAMES = ["target", "draft_1", "heads.jsonl", "continuations.jsonl", "draft_2", "sdsat", "head"]


def plan(home, rows=2, scale=1.0):
    return models.Plan(home, rows, ("stdlib",), scale)


def configs(stages):
    """The config of each training stage, by the stage's name."""
    trained = [stage for stage in stages if stage.begun]
    return {
        stage.begun.parent.name: from_toml(
            CONFIGS[stage.command[0]], stage.command[1], stage.command[3::2]
        )
        for stage in trained
    }


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_every_stage_is_a_valid_run_of_the_same_size(rows, tmp_path):
    by_stage = configs(plan(tmp_path, rows).stages())

    def tokens(name):
        optim = by_stage[name].optim
        return optim.total_steps * optim.batch_size * optim.accumulate * by_stage[name].data.seq_len

    assert list(by_stage) == [name for name in NAMES if "." not in name]
    assert tokens("target") >= 25e6 and tokens("sdsat") >= 3e6
    assert tokens("draft_1") + tokens("draft_2") == 24_576_000 and tokens("head") == 1_638_400


def test_a_stage_reads_the_products_of_earlier_ones(tmp_path):
    stages = plan(tmp_path).stages()
    products = [stage.product.relative_to(tmp_path).parts[0] for stage in stages]
    assert products == NAMES
    for place, stage in enumerate(stages):
        words = [word.partition("=")[2].strip('"[]') or word for word in stage.command[1:]]
        inside = [Path(word).relative_to(tmp_path) for word in words if str(tmp_path) in word]
        read = {path.parts[0] for path in inside} - {"tokens", f"{stage.product.parts[-3]}_tokens"}
        assert read <= set(products[: place + 1]), stage
        assert place == 0 or stage.product.name == "heads.jsonl" or read & set(products[:place]), (
            stage
        )


class Programs:
    """Fake programs: a call makes the stage's product, or returns the next code of ``answers``."""

    def __init__(self, home):
        self.products = {tuple(stage.command): stage.product for stage in plan(home).stages()}
        self.called, self.answers = [], []

    def __call__(self, command):
        python, module, *words = command
        assert (python, module) == (sys.executable, "-m")
        self.called.append(words)
        if self.answers:
            return self.answers.pop(0)
        product = self.products[tuple(word for word in words if word != "--resume")]
        product.parent.mkdir(parents=True, exist_ok=True)
        product.touch()
        return 0


def test_finished_stages_are_kept_and_begun_ones_resume(tmp_path, monkeypatch, capsys):
    programs = Programs(tmp_path)
    monkeypatch.setattr(models, "call", programs)
    monkeypatch.setattr(sys, "argv", ["models", str(tmp_path), "--corpora", "stdlib"])
    target, draft, *others = map(list, programs.products)
    programs.answers = [2]  # an exit code of 2: the program has printed its error
    assert models.main() == 2 and programs.called == [target]
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "metrics.jsonl").touch()
    programs.answers = [0]  # exit code 0 without the product: stopped and saved
    assert models.main() == 0 and "the same command goes on" in capsys.readouterr().err
    assert programs.called.pop() == [*target, "--resume"]
    programs.answers = [-signal.SIGTERM]
    assert models.main() == 143
    programs.called.clear()
    assert models.main() == 0 and "all models are in" in capsys.readouterr().out
    assert programs.called == [[*target, "--resume"], draft, *others]
    assert models.main() == 0 and len(programs.called) == 7


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rows": 3}, "--rows 3: expected 1, 2, 4, 8 or 16"),
        ({"rows": 0}, "--rows 0: expected"),
        ({"scale": 0.0}, "--scale 0.0: expected more than 0"),
        ({"scale": float("nan")}, "--scale nan: expected more than 0"),
    ],
)
def test_impossible_sizes_are_one_line_errors(tmp_path, settings, says):
    with pytest.raises(InputError, match=says):
        plan(tmp_path, **settings)


@pytest.mark.slow
def test_all_models_are_trained_and_decode(tmp_path):
    """At 1/2,000 of the size; the target's training is stopped once and resumed."""
    options = ["--corpora", "stdlib", "--scale", "0.0005", "--rows", "1"]
    command = [sys.executable, "-m", "train.demo.models", str(tmp_path), *options]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not (tmp_path / "target" / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # the run opens its log a moment before it listens to signals
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate(timeout=300)[1]
    assert process.returncode == 0 and "the same command goes on" in stderr
    assert not (tmp_path / "target" / "export").exists()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "all models are in" in done.stdout, done.stderr
    cards = {name: tmp_path / name / "export" / "card.json" for name in NAMES if "." not in name}
    assert all(json.loads(card.read_text())["finished"] for card in cards.values())
    target, draft, tuned, head = (
        sj.load(str(tmp_path / name / "export")) for name in ("target", "draft_2", "sdsat", "head")
    )

    def text(lm, **options):
        return sj.generate(lm, ["def f(x):"], max_new_tokens=8, **options).text

    for one in (draft, head):
        assert text(target, method="speculative", draft=one) == text(target)
    assert text(tuned, method="sdsat") == text(tuned)
