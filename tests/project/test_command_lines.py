"""Whatever a command line holds, a program ends with a documented code, and refuses in one line."""

import itertools
import shutil
from pathlib import Path

import pytest

from infer.serve import server
from support.command_lines import MAY_BE_EMPTY, PROGRAMS, VALUES, furnish, options, run

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


@each_program
def test_an_empty_value_is_refused_by_its_name(name, home, err):
    program = PROGRAMS[name]
    for option in set(options(program)) - MAY_BE_EMPTY:
        end = run(program, home, err, [f"{option}="])
        assert end.fault() is None and end.code == 2, (option, end)
        assert option in end.err, end
