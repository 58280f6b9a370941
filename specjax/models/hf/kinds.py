"""Says what a directory or a config holds that is no ordinary model, in one line.

Without it such a checkpoint fails later and elsewhere: a drafter's or a classifier's config reads
like the config of the model that it was made from.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax._util.checks import TEXT, format_value, list_of, quoted, require
from specjax._util.errors import ModelError
from specjax._util.files import parse_json, read_file

ADAPTER = "adapter_config.json"  # of PEFT
# What an entry of ``architectures`` shows; the first pattern that is found counts.
_KINDS = {
    "DFlash": "a DFlash drafter",
    "Eagle": "an EAGLE head",
    "Medusa": "Medusa heads",
    "MTP|Draft|Specul": "a drafter of a kind that is not read here",
    "Reward|ValueHead": "a reward model",
    "ForSequenceClass|ForTokenClass|ForQuestion|ForMultipleChoice": "a classifier",
    "ForConditional|VL|ForVision|ForSpeech": "an encoder-decoder, or of images or sound",
    "MaskedLM": "a masked language model",
    "Peft": "a PEFT adapter",
}
_WRAPPER = "FSDP"  # some trainers save the name of the class that wrapped the model's
_EAGLE3 = re.compile("eagle3|speculator", re.IGNORECASE)

# Directories of other formats, by a file that only they have.
_FORMATS = {
    "*.gguf": "weights in llama.cpp's format; name the file itself",
    "params.json": "weights in Meta's own format",
    "model_index.json": "a pipeline of diffusers",
}


def architectures(config: dict[str, Any]) -> list[str]:
    """The names of classes in a ``config.json``, without those of wrappers; maybe none.

    Raises:
      ModelError: they are no list of texts.
    """
    names = config.get("architectures")
    if names is None:
        return []
    require("config.json: ", "architectures", names, list_of(TEXT), ModelError)
    return [name.removeprefix(_WRAPPER) for name in names]


def names_eagle3(config: dict[str, Any]) -> bool:
    """Whether ``architectures`` names an EAGLE-3 head."""
    return any(map(_EAGLE3.search, architectures(config)))


def check_architectures(config: dict[str, Any], known: Sequence[str]) -> None:
    """Refuses a config whose ``architectures`` names none of the ``known`` classes.

    No names at all are accepted.

    Raises:
      ModelError: says what the first name stands for, and which names are known.
    """
    names = architectures(config)
    if not names or set(names) & set(known):
        return
    raise ModelError(
        f"config.json: architectures names {format_value(names[0])}, {_kind_of(names[0])}; "
        f"of model_type {quoted(config.get('model_type'))} only {known[0]} is read"
    )


def check_head(config: dict[str, Any], classes: Mapping[str, Sequence[str]]) -> None:
    """Refuses a config that has a draft vocabulary and is no EAGLE-3 head's.

    SafeAILab's heads name the class of an ordinary model, as in ``classes``.

    Raises:
      ModelError: says what the first of its ``architectures`` stands for.
    """
    names = architectures(config)
    ordinary = {name for known in classes.values() for name in known}
    if not names or names_eagle3(config) or ordinary.intersection(names):
        return
    raise ModelError(
        f"config.json: architectures names {format_value(names[0])}, {_kind_of(names[0])}; of "
        "heads only EAGLE-3's are read"
    )


def _kind_of(name: str) -> str:
    for pattern, kind in _KINDS.items():
        if re.search(pattern, name):
            return kind
    return "an unknown kind of model"


def unsupported_type(config: dict[str, Any], supported: Sequence[str]) -> ModelError:
    """The error for a ``model_type`` that is not among the supported ones."""
    text = f"model_type {quoted(config.get('model_type'))} is not supported"
    names = architectures(config)
    if "text_config" in config or "vision_config" in config:
        text += " (a model of images or sound, too)"
    elif config.get("is_encoder_decoder") is True:
        text += " (an encoder-decoder)"
    elif names:
        text += f" ({format_value(names[0])}, {_kind_of(names[0])})"
    if "auto_map" in config:
        text += ", and code that a checkpoint brings is never run"
    return ModelError(f"{text}; supported: {', '.join(supported)}")


def describe_directory(directory: Path) -> str:
    """What a directory without a config or weights holds instead, as `` (…)``; maybe nothing."""
    if (directory / ADAPTER).exists():
        return f" ({_describe_adapter(directory / ADAPTER)})"
    for pattern, kind in _FORMATS.items():
        found = sorted(directory.glob(pattern))
        if found:
            return f" ({found[0].name}: {kind})"
    return ""


def _describe_adapter(path: Path) -> str:
    """An adapter of PEFT, with its kind and its base where the file names them."""
    settings: Any = None
    with contextlib.suppress(OSError, ValueError):  # an adapter all the same
        settings = parse_json(read_file(path))
    if not isinstance(settings, dict):
        settings = {}
    kind = settings.get("peft_type")
    base = settings.get("base_model_name_or_path")
    text = f"{ADAPTER}: a PEFT adapter"
    if isinstance(kind, str):
        text = f"{ADAPTER}: a {kind} adapter"
    if isinstance(base, str):
        text += f" of {base}"
    return f"{text}; merge it into its base first, with PEFT's merge_and_unload"
