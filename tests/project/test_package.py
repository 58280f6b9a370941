"""The package as its users get it: what is in wheel and sdist, and the command ``specjax``."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

from infer.bench import commands as bench
from specjax import __main__ as command
from specjax._util.program import module_command
from specjax._util.shipped import config_names, config_path
from train.config import LMConfig, from_toml
from train.lm.__main__ import main as train_lm

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "programs.md").read_text(encoding="utf-8")
WHEEL_MEGABYTES = 40  # as all weights that come with it may have
OF_ANOTHER_PACKAGE = "infer.lm_eval"  # its arguments are lm-eval's


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """A folder with a wheel and an sdist of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist) -> zipfile.ZipFile:
    (path,) = dist.glob("*.whl")
    with zipfile.ZipFile(path) as file:
        yield file


def shipped(*folders: str) -> set[str]:
    """The files of these folders of the checkout, without what Python writes there."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.is_file() and "__pycache__" not in path.parts
    }


# --- wheel and sdist --------------------------------------------------------------------------


def test_the_wheel_has_the_packages_and_the_configs_and_nothing_else(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    configs = {f"specjax/{name}" for name in shipped("configs")}
    assert names == shipped("specjax", "infer", "train") | configs


def test_the_wheel_is_small(dist):
    (path,) = dist.glob("*.whl")
    assert path.stat().st_size < WHEEL_MEGABYTES * 1e6


def test_the_index_page_has_no_link_that_leads_nowhere(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    metadata = BytesParser().parsebytes(wheel.read(name))
    page = metadata.get_payload()
    assert "specjax is a library for speculative decoding" in page
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert links and all(link.startswith("https://") for link in links)
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Author"]


def test_the_sdist_has_tests_docs_and_constraints(dist):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    needed = shipped("specjax", "infer", "train", "tests", "configs", "docs", "examples")
    assert names >= needed | {"constraints.txt", "CITATION.cff", "SECURITY.md", ".ci/run"}


def test_the_wheel_finds_its_configs_in_any_directory(wheel, tmp_path):
    home, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    wheel.extractall(home)
    elsewhere.mkdir()
    code = (
        "from specjax._util import shipped; print(*shipped.config_names()); "
        "print(shipped.config_path('configs/tiny.toml'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
    )
    names, path = done.stdout.splitlines()
    assert names.split() == list(config_names())
    assert path == str(home / "specjax" / "configs" / "tiny.toml")


# --- configs by name --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "tiny.toml", "configs/tiny.toml"])
def test_a_config_is_found_by_name_from_another_directory(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert from_toml(LMConfig, name).run.dir == "runs/tiny"


def test_a_file_of_the_user_comes_before_a_shipped_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny").write_text('[run]\ndir = "mine"\n')
    assert from_toml(LMConfig, "tiny").run.dir == "mine"


def test_options_are_read_from_a_shipped_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("papers/mentored", "configs/papers/mentored.toml"):
        args = bench.parse_with_config(bench.parser(), ["--config", name])
        assert args.methods == "speculative,mentored"


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\0b", "\udcc3", "../tiny", "none"])
def test_another_name_stays_as_it_is(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config_path(name) == Path(name)


def test_configs_are_listed_with_what_they_are_for(capsys):
    with pytest.raises(SystemExit) as stop:
        train_lm(["--list-configs"])
    lines = capsys.readouterr().out.splitlines()
    assert stop.value.code == 0
    assert [line.split()[0] for line in lines] == [n for n in config_names() if "/" not in n]
    with pytest.raises(SystemExit):
        bench.main(["--list-configs"])
    assert "papers/mentored  " in capsys.readouterr().out


# --- the command ------------------------------------------------------------------------------


def test_the_command_and_the_page_know_the_same_programs():
    documented = set(re.findall(r"^\| `python -m ([\w.]+)` \|", PAGE, re.M))
    modules = {program.module for program in command.PROGRAMS.values()}
    assert modules == documented | {"infer.code_task"}
    for name, program in command.PROGRAMS.items():
        top, _, last = program.module.partition(".")
        prefix = "" if top == "infer" else "train-"
        assert name == prefix + last.replace("_", "-")
        assert f"`specjax {name}`" in PAGE
        assert program.main.startswith(program.module)


@pytest.mark.parametrize("name", command.PROGRAMS)
def test_every_program_has_a_help_that_names_it_as_it_was_called(name, monkeypatch, capsys):
    program = command.PROGRAMS[name]
    if program.module == OF_ANOTHER_PACKAGE:
        assert callable(importlib.import_module(program.main).main)
        return
    monkeypatch.setattr(sys, "argv", ["specjax", name, "--help"])
    with pytest.raises(SystemExit) as stop:
        command.main()
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert text.startswith(f"usage: specjax {name} ")
    assert f"python -m {program.module} " not in text


def test_the_help_lists_every_program(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/specjax", "--help"])
    with pytest.raises(SystemExit):
        command.main()
    text = capsys.readouterr().out
    assert text.startswith("usage: specjax ")
    for name, program in command.PROGRAMS.items():
        assert re.search(rf"^  {name} +{re.escape(program.text)}$", text, re.M)


@pytest.mark.parametrize("argv", [[], ["decode"], [""]])
def test_a_wrong_program_is_refused_in_one_line(argv, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["specjax", *argv])
    with pytest.raises(SystemExit) as stop:
        command.main()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("specjax: ") and line.endswith("see --help")


@pytest.mark.parametrize(("package", "name"), [("train", "train-lm"), ("infer", "run")])
@pytest.mark.parametrize("file", ["{}.py", "{}/__init__.py"])
def test_a_file_that_hides_a_package_is_named_in_one_line(package, name, file, tmp_path):
    stranger = tmp_path / file.format(package)
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_text("raise SystemExit('a stranger was imported')")
    words = [sys.executable, "-m", "specjax", name, "--help"]
    done = subprocess.run(words, cwd=tmp_path, env=found(), capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"specjax: {stranger} hides specjax's package {package!r}")
    assert len(done.stderr.splitlines()) == 1
    # As the console script starts it: the working directory is not searched.
    words[1:1] = ["-P"]
    done = subprocess.run(words, cwd=tmp_path, env=found(), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: specjax {name}")


def test_a_program_starts_its_own_processes_beside_such_a_file(tmp_path):
    (tmp_path / "infer.py").write_text("raise SystemExit('a stranger was imported')")
    words = [*module_command("infer.convert"), "--help"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: python -m infer.convert ")


def found() -> dict[str, str]:
    """The environment with this checkout on the path, behind the working directory."""
    return os.environ | {"PYTHONPATH": str(ROOT)}


# --- an editable install ----------------------------------------------------------------------


@pytest.mark.slow
def test_an_editable_install_works_from_the_directory_above_a_clone(tmp_path):
    """There, a folder ``specjax`` without ``__init__.py`` is what Python finds first."""
    clone, site = tmp_path / "specjax", tmp_path / "venv"
    for folder in ("specjax", "infer", "train", "configs"):
        shutil.copytree(ROOT / folder, clone / folder, ignore=shutil.ignore_patterns("*tensors"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, clone / file)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(site)], check=True)
    (packages,) = site.glob("lib/*/site-packages")
    # What specjax needs, from this environment; the path files in it, ours included, are not read.
    (packages / "others.pth").write_text("\n".join(p for p in sys.path if "site-packages" in p))
    pip = [sys.executable, "-m", "pip", f"--python={site / 'bin' / 'python'}", "install", "-q"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", str(clone)], check=True)
    environment = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
    for words, says in (
        (["python", "-c", "import specjax; print(specjax.load.__module__)"], "specjax.lm"),
        (["python", "-m", "infer.run", "--version"], "specjax "),
        (["specjax", "train-lm", "--list-configs"], "tiny "),
    ):
        command_line = [str(site / "bin" / words[0]), *words[1:]]
        done = subprocess.run(
            command_line, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0 and says in done.stdout, done.stderr
