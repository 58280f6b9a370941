"""Whatever a command line holds, a program ends with a documented code, and refuses in one line."""

import contextlib
import dataclasses
import itertools
import json
import shutil
import sys
from pathlib import Path

import pytest

from infer.lm_eval.__main__ import main as lm_eval_program
from infer.serve import server
from specjax import __main__ as command
from specjax._util.errors import SpecjaxError
from support.command_lines import (
    DEMO_PROGRAMS,
    MAY_BE_EMPTY,
    MODELS,
    PROGRAMS,
    VALUES,
    furnish,
    options,
    run,
)
from train.data.corpus import Document
from train.demo import heldout, signatures

each_program = pytest.mark.parametrize("name", PROGRAMS)


@pytest.fixture(scope="module")
def home(tiny_pair_dirs, tmp_path_factory):
    """Two models, prompts and a text for training."""
    directory = tmp_path_factory.mktemp("home")
    for number, model in enumerate(tiny_pair_dirs):
        shutil.copytree(model, directory / str(number))
        shutil.copy(Path(model).parent / "tokenizer.json", directory / str(number))
    furnish(directory)
    return directory


@pytest.fixture(autouse=True)
def no_requests(monkeypatch):
    """infer.serve ends when it would wait for requests."""
    monkeypatch.setattr(server, "_answer_requests", lambda *args: None)


@pytest.fixture
def err(capfd):
    return lambda: capfd.readouterr().err


@pytest.mark.slow
def test_every_program_has_hostile_command_lines():
    """But for the adapter of lm-eval, whose command line is that package's own."""
    modules = {program.module for program in command.PROGRAMS.values()}
    assert set(PROGRAMS) == modules - {"infer.lm_eval"}


@each_program
def test_the_arguments_of_the_table_are_accepted(name, home, err):
    end = run(PROGRAMS[name], home, err)
    assert end.code == 0 or (end.code == 2 and "none.jsonl: cannot be read" in end.err), end


@each_program
def test_any_value_of_an_option_is_used_or_refused_in_one_line(name, home, err):
    program = PROGRAMS[name]
    before = sorted(home.iterdir())
    faults = {}
    for option, value in itertools.product(options(program), VALUES):
        end = run(program, home, err, [f"{option}={VALUES[value]}"])
        fault = end.fault()
        if end.code == 2 and end.made and option != "--out":
            fault = f"made {end.made}"
        if fault:
            faults[option, value] = fault
    assert faults == {}
    assert sorted(home.iterdir()) == before


# The keys of a training config that hold texts, and texts that none of them may be.
KEYS = ("data.corpora", "data.files", "run.dir")
TEXTS = ("empty", "NUL", "a surrogate", "a long name", "a long path", "below a file", "a device")


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("train.")])
def test_a_hostile_text_in_a_config_is_refused_by_its_key(name, home, err):
    for key, value in itertools.product(KEYS, TEXTS):
        unused = name in ("train.tokens", "train.states") and key == "run.dir"
        if unused and value != "empty":
            continue  # it does not use it
        text = json.dumps(VALUES[value].replace("{home}", str(home)), ensure_ascii=False)
        setting = f"{key}={text}" if key == "run.dir" else f"{key}=[{text}]"
        end = run(PROGRAMS[name], home, err, [f"--set={setting}"])
        assert end.fault() is None and end.code == 2 and not end.made, (setting[:99], end)


def test_an_override_without_a_value_does_not_count_as_not_given(home, err):
    """As of ``--set distill.teacher=$TEACHER``, where the variable is not set."""
    end = run(PROGRAMS["train.lm"], home, err, ["--set=distill.teacher="])
    assert end.code == 2
    assert "--set 'distill.teacher=': the value is empty; write distill.teacher=''" in end.err


@pytest.fixture
def little_to_do(monkeypatch):
    """A corpus of some functions."""
    body = "def f(x):\n    y = x\n    y += 1\n    y += 2\n    return y\n"
    documents = [Document(f"stdlib/{number}.py", body) for number in range(20)]
    for module in (heldout, signatures):
        monkeypatch.setattr(module, "load_corpus", lambda names: documents)


@pytest.mark.parametrize("name", DEMO_PROGRAMS)
def test_any_argument_of_the_demo_programs_is_used_or_refused_in_one_line(
    name, home, err, little_to_do
):
    program = DEMO_PROGRAMS[name]
    before = sorted(home.iterdir())
    assert run(program, home, err).code == 0
    faults = {}
    for option, value in itertools.product([*options(program), "place"], VALUES):
        changed = []
        places = []
        if option == "place":
            places.append(VALUES[value])
        else:
            changed.append(f"{option}={VALUES[value]}")
        end = run(program, home, err, changed, places)
        fault = end.fault()
        if end.code == 2 and end.made:
            fault = f"made {end.made}"
        if fault:
            faults[option, value] = fault
    assert faults == {} and sorted(home.iterdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "key",
    [
        *("pretrained", "draft", "method", "batch_size", "max_gen_toks", "seed", "dtype"),
        *("quantize", "gamma", "unknown"),
    ],
)
def test_any_model_argument_of_lm_eval_is_used_or_refused(key, home):
    from infer.lm_eval.model import Specjax

    given = {"pretrained": f"{home}/0", "draft": f"{home}/1", "method": "speculative"}
    for value in VALUES.values():
        with contextlib.suppress(SpecjaxError, OSError):  # each is one line and an exit code
            Specjax(**(given | {key: value.replace("{home}", str(home))}))


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["--tasks=nosuchtask", "--limit=2 --samples={}"])
def test_what_lm_eval_refuses_is_one_line(argument, monkeypatch, err):
    words = ["lm_eval", "run", "--model", "specjax", "--tasks", "nosuchtask", *argument.split()]
    monkeypatch.setattr(sys, "argv", words)
    assert lm_eval_program() == 2
    (line,) = (line for line in err().splitlines() if line.startswith("infer.lm_eval:"))
    assert line.startswith("infer.lm_eval: lm-eval: ")


@pytest.mark.parametrize("method", ["mtad", "cdsl"])
def test_tuning_names_a_file_as_the_command_line_does(method, home, err):
    missing = f"{home}/none.jsonl"
    arguments = (*MODELS, f"--method={method}", "--out=made")
    program = dataclasses.replace(PROGRAMS["infer.tune"], arguments=arguments)
    end = run(program, home, err)
    assert end.code == 2 and f"FILE {missing}: cannot be read" in end.err
    end = run(program, home, err, [f"--test={missing}"], [f"{home}/prompts.jsonl"])
    assert end.code == 2 and f"--test {missing}: cannot be read" in end.err


@each_program
def test_an_empty_value_is_refused_by_its_name(name, home, err):
    program = PROGRAMS[name]
    for option in set(options(program)) - MAY_BE_EMPTY:
        end = run(program, home, err, [f"{option}="])
        assert end.fault() is None and end.code == 2, (option, end)
        assert option in end.err, end
