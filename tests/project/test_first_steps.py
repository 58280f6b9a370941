"""The blocks of docs/first-steps.md run as they are printed, in an empty directory."""

import re
import shlex
import subprocess
import sys

import pytest

from support.tools import DOCS

PAGE = (DOCS / "first-steps.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    "reader", ["decode", pytest.param("train", marks=pytest.mark.sweep), "rule"]
)
def test_the_first_steps_of_a_reader(reader, tmp_path):
    """The commands of the page's section, in order."""
    section = next(part for part in PAGE.split("\n## ") if reader in part.splitlines()[0])
    blocks = re.findall(r"```(bash|python)\n(.*?)```", section, re.S)
    assert blocks
    for kind, block in blocks:
        if kind == "python":
            commands = [[sys.executable, "-c", block]]
        else:
            commands = [_command(line) for line in block.strip().splitlines()]
        for command in commands:
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]


def _command(line: str) -> list[str]:
    """The words of a line, with ``specjax`` run by this Python."""
    words = shlex.split(line)
    assert words[0] == "specjax"
    return [sys.executable, "-m", *words]
