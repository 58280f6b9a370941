"""The configs that come with the package, by name: ``tiny`` is ``configs/tiny.toml``.

A wheel holds a copy of the folder ``configs`` beside this package's folders. A checkout, and so an
editable install, has the folder itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from specjax._util.errors import InputError
from specjax._util.program import require_output

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")


def config_names() -> dict[str, Path]:
    """The file of each shipped config by its name, such as ``tiny`` or ``papers/mentored``."""
    folder = next((folder for folder in _FOLDERS if (folder / "tiny.toml").is_file()), None)
    if folder is None:
        return {}
    found = sorted(folder.rglob("*.toml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in found}


def config_path(text: str | Path) -> Path:
    """The file that ``text`` names: that file if there is one, or else a shipped config.

    ``tiny``, ``tiny.toml`` and ``configs/tiny.toml`` all name a shipped one, so that the commands
    of the documentation work in any directory.
    """
    path = Path(text)
    name = path.as_posix().removeprefix("configs/").removesuffix(".toml")
    try:
        is_there = path.is_file()
    except (OSError, ValueError):  # a name that is too long: who opens the file says so
        is_there = False
    return path if is_there else config_names().get(name, path)


class ListConfigs(argparse.Action):
    """The action of ``--list-configs``: prints the shipped configs and what each is for.

    ``const`` is the folder of the program's configs below ``configs``; empty: that one itself.
    """

    def __init__(self, option_strings: list[str], dest: str, const: str = "", **other: object):
        text = "list the configs that come with specjax; each can be named as it is listed"
        super().__init__(option_strings, dest, nargs=0, const=const, help=text)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        try:
            require_output()
        except InputError as error:
            parser.error(str(error))
        for name, path in config_names().items():
            if name.rpartition("/")[0] == self.const:
                with path.open(encoding="utf-8") as file:
                    purpose = file.readline().strip("# \n")
                print(f"{name:<25} {purpose}")
        parser.exit()
