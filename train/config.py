"""Training configs: frozen dataclasses filled from TOML, every key checked.

Unknown keys, wrong types and values out of range are errors that name the key and the way
out. Any program's config is a dataclass of sections, read by :func:`from_toml`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from specjax.errors import InputError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Model:
    """The network: either its sizes, or a directory to go on from."""

    init_from: str = ""
    hidden_size: int = 320
    num_layers: int = 6
    num_heads: int = 5
    num_kv_heads: int = 0  # 0: as num_heads
    intermediate_size: int = 864
    max_position: int = 2048
    rope_theta: float = 10000.0
    tie_embeddings: bool = True


@dataclasses.dataclass(frozen=True)
class Data:
    """The corpus and how it is cut."""

    corpora: tuple[str, ...] = ("stdlib",)
    files: tuple[str, ...] = ()
    seq_len: int = 512


@dataclasses.dataclass(frozen=True)
class TokenizerSection:
    """A tokenizer.json to reuse, or the size of the one to train."""

    path: str = ""
    vocab_size: int = 4096


@dataclasses.dataclass(frozen=True)
class Optim:
    """Optimiser and schedule. The rate is a function of the step alone, so ``total_steps``
    may be changed on ``--resume`` to anneal a run early or to extend it."""

    optimizer: str = "adamw"  # adamw | muon
    learning_rate: float = 3e-3  # of AdamW: everything, or what Muon leaves
    muon_learning_rate: float = 2e-2  # of the matrices inside the blocks
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1  # on matrices only
    clip_norm: float = 1.0
    schedule: str = "wsd"  # wsd | cosine
    warmup_steps: int = 50
    decay_fraction: float = 0.3  # wsd: the share of steps that anneals
    final_fraction: float = 0.02  # of the peak rate, at the end
    total_steps: int = 1000
    batch_size: int = 16  # rows per step
    accumulate: int = 1  # micro-batches that make up one step


@dataclasses.dataclass(frozen=True)
class Distill:
    """Learning from a teacher's distributions; off where ``teacher`` is empty."""

    teacher: str = ""
    alpha: float = 1.0  # weight of KL(teacher ‖ student); the rest is cross-entropy on the data
    temperature: float = 1.0


@dataclasses.dataclass(frozen=True)
class Run:
    """Where the run lives and how often it reports and saves."""

    dir: str = "runs/lm"
    seed: int = 0
    log_every: int = 10
    eval_every: int = 200
    eval_batches: int = 8
    checkpoint_every: int = 100
    keep: int = 2
    export_dtype: str = "float32"
    tensorboard: bool = False  # also write event files into dir/events


@dataclasses.dataclass(frozen=True)
class LMConfig:
    """``python -m train.lm``: one section per concern."""

    model: Model = Model()
    data: Data = Data()
    tokenizer: TokenizerSection = TokenizerSection()
    optim: Optim = Optim()
    distill: Distill = Distill()
    run: Run = Run()


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The checkpoint to tune, and what of it is trained."""

    init_from: str = ""  # a Hugging Face directory, or an embedded model's name
    tokenizer: str = ""  # a tokenizer.json; by default the checkpoint's own
    train: str = "full"  # full | embeddings | lora
    lora_rank: int = 16
    lora_alpha: float = 32.0
    compute_dtype: str = "float32"  # of the forward pass; master weights are float32
    remat: bool = False  # recompute each block in the backward pass
    scan: bool = False  # compile one block and scan the layers: deep models compile sooner


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """SDSAT: which ids are adaptive, where they are put, and what they learn."""

    window: int = 5  # L
    ids: tuple[int, ...] = ()  # empty: unused vocabulary, else new rows
    distinct: bool = False  # one id per place of the window, instead of one for all
    start_rate: float = 0.1  # 0 with loss basic: plain continued training, for comparison
    loss: str = "isolated"  # basic | improved | isolated
    adaptive_targets: str = "self"  # data | self | mix
    mix: float = 0.5  # share of self targets in mix
    weight: float = 1.0  # w
    probe_length: int = 0  # adaptive tokens of a held-out window; 0: as window
    decode_prompts: int = 16  # held-out prompts that each evaluation continues greedily
    decode_tokens: int = 64  # new tokens of each
    fim_rate: float = 0.5  # documents rearranged for infilling; needs the sentinels


@dataclasses.dataclass(frozen=True)
class MeshSection:
    """All devices of the run take part; each holds its share of a batch's rows."""

    fsdp: int = 1  # devices that share one copy of the params and the optimiser state
    devices: int = 0  # that the run must have, and --dry-run plans for; 0: those that are there
    topology: str = ""  # of TPUs that --dry-run compiles for, e.g. v5e:2x4
    memory_gib: float = 0.0  # of one device, for --dry-run; 0: as the device says


@dataclasses.dataclass(frozen=True)
class SDSATConfig:
    """``python -m train.sdsat``: one section per concern."""

    model: Tuned = Tuned()
    data: Data = Data()
    sdsat: Adaptive = Adaptive()
    optim: Optim = Optim()
    mesh: MeshSection = MeshSection()
    run: Run = Run(dir="runs/sdsat")


_CHOICES = {
    "model.train": ("full", "embeddings", "lora"),
    "model.compute_dtype": ("float32", "bfloat16"),
    "sdsat.loss": ("basic", "improved", "isolated"),
    "sdsat.adaptive_targets": ("data", "self", "mix"),
    "optim.optimizer": ("adamw", "muon"),
    "optim.schedule": ("wsd", "cosine"),
    "run.export_dtype": ("float32", "bfloat16", "float16"),
}
_POSITIVE = {
    "model.hidden_size",
    "model.num_layers",
    "model.num_heads",
    "model.intermediate_size",
    "model.max_position",
    "data.seq_len",
    "optim.total_steps",
    "optim.batch_size",
    "optim.accumulate",
    "optim.learning_rate",
    "optim.muon_learning_rate",
    "run.log_every",
    "run.eval_every",
    "run.checkpoint_every",
    "run.keep",
    "optim.clip_norm",
    "distill.temperature",
    "model.lora_rank",
    "model.lora_alpha",
    "sdsat.window",
    "sdsat.decode_tokens",
    "mesh.fsdp",
}
_NOT_NEGATIVE = {
    "model.num_kv_heads",
    "optim.warmup_steps",
    "optim.weight_decay",
    "run.eval_batches",
    "run.seed",
    "sdsat.probe_length",
    "sdsat.weight",
    "sdsat.decode_prompts",
    "mesh.devices",
    "mesh.memory_gib",
}
_BELOW_ONE = {"optim.beta1", "optim.beta2", "sdsat.start_rate"}
_FRACTIONS = {
    "optim.decay_fraction",
    "optim.final_fraction",
    "distill.alpha",
    "sdsat.mix",
    "sdsat.fim_rate",
}


def from_toml(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """The dataclass ``cls`` from a TOML file and ``section.key=value`` overrides.

    Raises:
      InputError: no such file, broken TOML, an unknown section or key, a wrong type or range.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise InputError(f"{path}: no such config file; configs/ holds examples") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid TOML ({error})") from None
    for override in overrides:
        _apply(values, override)
    return from_dict(cls, values)


def from_dict(cls: type[T], values: dict[str, Any]) -> T:
    """The dataclass ``cls`` from nested dicts, as TOML and JSON give them.

    Raises:
      InputError: an unknown section or key, a wrong type or range.
    """
    return _section(cls, values, "")


def _apply(values: dict[str, Any], override: str) -> None:
    name, found, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not found or not dot or not key:
        raise InputError(
            f"--set {override!r}: expected section.key=value, e.g. optim.total_steps=9"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    if not isinstance(values.setdefault(section, {}), dict):
        raise InputError(f"--set {override!r}: {section!r} is no section")
    values[section][key] = value


def _section(cls: type[T], values: dict[str, Any], prefix: str) -> T:
    fields = typing.get_type_hints(cls)
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; known: {', '.join(fields)}"
            raise InputError(f"unknown key {prefix}{key}{hint}")
    return cls(**{key: _value(fields[key], value, prefix + key) for key, value in values.items()})


def _value(kind: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise InputError(f"{name}={value!r}: expected a section [{name}]")
        return _section(kind, value, f"{name}.")
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if not isinstance(value, list) or not all(type(x) is item for x in value):
            what = "strings" if item is str else "integers"
            raise InputError(f"{name}={value!r}: expected a list of {what}")
        return tuple(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(kind, types.UnionType) or type(value) is not kind:
        raise InputError(f"{name}={value!r}: expected {kind.__name__}, got {type(value).__name__}")
    _check_range(value, name)
    return value


def _check_range(value: Any, name: str) -> None:
    if name in _CHOICES and value not in _CHOICES[name]:
        raise InputError(f"{name}={value!r}: expected one of {', '.join(_CHOICES[name])}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name}={value!r}: expected a finite number")
    if name in _NOT_NEGATIVE and value < 0:
        raise InputError(f"{name}={value!r}: expected 0 or more")
    if name in _BELOW_ONE and not 0 <= value < 1:
        raise InputError(f"{name}={value!r}: expected a number from 0 to below 1")
    if name in _POSITIVE and not value > 0:
        raise InputError(f"{name}={value!r}: expected a number above 0")
    if name in _FRACTIONS and not 0 <= value <= 1:
        raise InputError(f"{name}={value!r}: expected a number from 0 to 1")
