"""Read configs from TOML files, ``--set`` overrides and dicts, and check every key and value.

Unknown keys, wrong types and values out of range are errors. Each names the key and the way out.
This file knows no section: it reads any dataclass whose fields are sections or plain values. What
other trainers call a key, and which keys have no effect, is in :mod:`train.config.aliases` and
:mod:`train.config.effects`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from specjax._util.checks import Check, quoted
from specjax._util.errors import InputError, errors_as
from specjax._util.files import read_file
from specjax._util.shipped import config_path
from train.config.aliases import hint, renamed
from train.config.effects import keys_without_effect
from train.config.sections import Name, PositiveFloat

T = TypeVar("T")

# A dotted key of more than 16 parts: tomllib takes cubic time to parse it.
LONG_KEY = re.compile(rb"^[\[\w\"' \t-]*(\.[\w\"' \t-]*){16}", re.MULTILINE)


def from_toml(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """Build the dataclass ``cls`` from a TOML file and ``section.key=value`` overrides.

    Keys without effect are named on stderr.

    Raises:
      InputError: the file is missing or not TOML, or a section, key, type or range is wrong.
    """
    values = read_toml(path, overrides)
    cfg = from_dict(cls, values)
    given = {name: renamed(name, x, vars(getattr(cfg, name))) for name, x in values.items()}
    for line in keys_without_effect(cfg, given):
        print(f"{path}: {line}", file=sys.stderr)
    return cfg


def read_toml(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The values of a TOML file and ``section.key=value`` overrides, unchecked.

    Where there is no such file, ``path`` may name a config that comes with specjax.

    Raises:
      InputError: the file is missing or not valid TOML, or an override has another form.
    """
    try:
        text = read_file(config_path(path))
    except (FileNotFoundError, IsADirectoryError):
        raise InputError(f"{path}: no such config file; see --list-configs") from None
    except OSError as error:
        raise InputError(f"cannot read the config {path}: {error.strerror}") from None

    if LONG_KEY.search(text):
        raise InputError(f"{path}: has a key of more than 16 parts; section.key has two")
    with errors_as(f"{path}: not valid TOML", InputError):  # ValueError, RecursionError
        values = tomllib.loads(text.decode())

    for override in overrides:
        _apply_override(values, override)
    return values


def from_dict(cls: type[T], values: dict[str, Any]) -> T:
    """Build the dataclass ``cls`` from nested dicts, as TOML and JSON give them.

    A section that is given in part keeps the other values that it has in ``cls``. Names of other
    trainers are accepted where they mean the same.

    Raises:
      InputError: a section or key is unknown, or a value has a wrong type or range.
    """
    sections = inspect.get_annotations(cls, eval_str=True)
    keys = {name: inspect.get_annotations(kind, eval_str=True) for name, kind in sections.items()}
    arguments = {}
    for name, section in values.items():
        if name not in keys:
            raise _unknown_key(name, "", keys, keys)
        _require(isinstance(section, dict), name, section, f"a section [{name}]")
        read = {}
        for key, value in renamed(name, section, keys[name]).items():
            if key not in keys[name]:
                raise _unknown_key(key, f"{name}.", keys[name], keys)
            read[key] = _read_value(keys[name][key], value, f"{name}.{key}")
        arguments[name] = dataclasses.replace(getattr(cls, name), **read)
    return cls(**arguments)


def to_dict(cfg: Any) -> dict[str, Any]:
    """The config as nested dicts that JSON can hold; :func:`from_dict` reads them back."""
    return json.loads(json.dumps(cfg, default=vars))


def _unknown_key(
    key: str, prefix: str, known: dict[str, Any], sections: dict[str, dict[str, Any]]
) -> InputError:
    """The error of a key; ``known`` are those of its place, ``sections`` those of all places."""
    similar = difflib.get_close_matches(key, known, 1)
    text = hint(key, sections)
    if text is None and similar:
        text = f"did you mean {prefix}{similar[0]}?"
    if text is None:
        text = f"known: {', '.join(known)}"
    return InputError(f"unknown key {prefix}{key}; {text}")


def _apply_override(values: dict[str, Any], override: str) -> None:
    """Set one ``section.key=value`` in the nested dict ``values``."""
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot or not key:
        raise InputError(
            f"--set {quoted(override)}: expected section.key=value, e.g. optim.total_steps=9"
        )

    if not text.strip():  # as of a variable of the shell that is not set
        raise InputError(f"--set {quoted(override)}: the value is empty; write {name.strip()}=''")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    except (ValueError, RecursionError):
        raise InputError(
            f"--set {quoted(override)}: the number is too long, or the list too deep"
        ) from None

    keys = values.setdefault(section, {})
    if not isinstance(keys, dict):
        raise InputError(f"--set {quoted(override)}: {section!r} is not a section")
    keys[key] = value


def _require(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise InputError(f"{name}={quoted(value)}: expected {expected}")


def _read_value(kind: Any, value: Any, name: str) -> Any:
    """``value`` as a field with annotation ``kind`` stores it; ``name`` is for error messages."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _read_flag_or_word(kind, value, name)
    if origin is dict:
        _require(isinstance(value, dict), name, value, "a table, such as {enable_thinking = false}")
        return value
    if origin is tuple:
        return _read_list(get_args(kind)[0], value, name)
    if origin is Annotated:
        plain_type, *checks = get_args(kind)
        return _read_scalar(plain_type, value, name, checks)
    if origin is Literal:
        words = get_args(kind)
        word = _read_scalar(str, value, name)
        _require(word in words, name, value, f"one of {', '.join(words)}")
        return word
    return _read_scalar(kind, value, name)


def _read_flag_or_word(kind: Any, value: Any, name: str) -> Any:
    """A field of type ``bool | Literal[...]``."""
    if isinstance(value, bool):
        return value
    words = [word for member in get_args(kind) for word in get_args(member)]
    _require(value in words, name, value, f"one of true, false, {', '.join(words)}")
    return value


def _read_list(item_kind: Any, value: Any, name: str) -> tuple:
    """A field of type ``tuple[item_kind, ...]``."""
    if item_kind is Name or get_origin(item_kind) is Literal:
        items = "strings"
    elif item_kind is PositiveFloat:
        items = "numbers"
    else:
        items = "integers"
    _require(isinstance(value, list), name, value, f"a list of {items}")
    return tuple(_read_value(item_kind, item, name) for item in value)


def _read_scalar(plain_type: type, value: Any, name: str, checks: Sequence[Check] = ()) -> Any:
    """A bool, int, float or str that passes all ``checks``."""
    # TOML writes whole floats as integers. type() and not isinstance(): a bool is no int here.
    whole_float = plain_type is float and type(value) is int
    right_type = whole_float or type(value) is plain_type
    _require(right_type, name, value, f"{plain_type.__name__}, got {type(value).__name__}")
    if plain_type is str:
        _require("\0" not in value, name, value, "a text without NUL")

    for check in checks:
        _require(check.holds(value), name, value, check.description)
    return plain_type(value)
