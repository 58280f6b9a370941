"""Training configs: frozen dataclasses filled from TOML, every key checked.

Unknown keys, wrong types and values out of range are errors that name the key and the way
out. Any program's config is a dataclass of sections, read by :func:`from_toml`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from specjax._util.checks import FROM_0, INT32_MAX, POSITIVE, SEED_MAX, number, quoted, whole
from specjax._util.errors import InputError, foreign
from specjax._util.files import read_file

T = TypeVar("T")
# tomllib takes cubic time for them.
LONG_KEY = re.compile(rb"^[\[\w\"' \t-]*(\.[\w\"' \t-]*){16}", re.MULTILINE)


# A type, and beside it the check that a value must pass.
PositiveInt, PositiveFloat = Annotated[int, whole()], Annotated[float, POSITIVE]
NotNegativeInt, NotNegativeFloat = Annotated[int, whole(0)], Annotated[float, FROM_0]
BelowOne = Annotated[float, number(0, 1, below=True)]
Fraction = Annotated[float, number(0, 1)]
Layers = Annotated[int, whole(1, 4096)]
Width = Annotated[int, whole(1, 2**20)]
Vocabulary = Annotated[int, whole(261, 2**20)]  # 256 bytes and train.data.tokenizer's special ids
Seed = Annotated[int, whole(0, SEED_MAX)]
Matrix = Literal["q", "k", "v", "out", "gate", "up", "down"]
ComputeDtype = Literal["float32", "bfloat16"]
Remat = bool | Literal["attention"]


@dataclasses.dataclass(frozen=True)
class Model:
    """The network: either its sizes, or a directory to go on from."""

    init_from: str = ""
    hidden_size: Width = 320
    num_layers: Layers = 6
    num_heads: Width = 5
    num_kv_heads: NotNegativeInt = 0  # 0: as num_heads
    intermediate_size: Width = 864
    max_position: PositiveInt = 2048
    rope_theta: PositiveFloat = 10000.0
    tie_embeddings: bool = True
    compute_dtype: ComputeDtype = "float32"  # of the forward pass; master weights: float32
    remat: Remat = False  # as of a tuned checkpoint


@dataclasses.dataclass(frozen=True)
class DataSection:
    """The corpus and how it is cut."""

    corpora: tuple[str, ...] = ("stdlib",)
    files: tuple[str, ...] = ()
    shards: str = ""  # a directory for its tokens; empty: all of the corpus is held in memory
    weights: tuple[PositiveFloat, ...] = ()  # rows of each corpus and file against the others'
    seq_len: Width = 512


@dataclasses.dataclass(frozen=True)
class TokenizerSection:
    """A tokenizer.json to reuse, or the size of the one to train."""

    path: str = ""
    vocab_size: Vocabulary = 4096


@dataclasses.dataclass(frozen=True)
class Optim:
    """Optimizer and schedule. The rate is a function of the step alone, so ``total_steps``
    may be changed on ``--resume`` to anneal a run early or to extend it."""

    optimizer: Literal["adamw", "muon", "adafactor"] = "adamw"
    moments: Literal["float32", "bfloat16"] = "float32"  # of running means; adafactor keeps none
    learning_rate: PositiveFloat = 3e-3  # of all that Muon does not take
    muon_learning_rate: PositiveFloat = 2e-2  # of the matrices inside the blocks
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    weight_decay: NotNegativeFloat = 0.1  # on matrices only
    clip_norm: PositiveFloat = 1.0
    schedule: Literal["wsd", "cosine"] = "wsd"
    warmup_steps: NotNegativeInt = 50
    decay_fraction: Fraction = 0.3  # wsd: the share of steps that anneals
    final_fraction: Fraction = 0.02  # of the peak rate, at the end
    total_steps: PositiveInt = 1000
    batch_size: PositiveInt = 16  # rows per step
    accumulate: PositiveInt = 1  # micro-batches that make up one step


@dataclasses.dataclass(frozen=True)
class Distill:
    """Learning from a teacher's distributions; off where ``teacher`` is empty."""

    teacher: str = ""
    alpha: Fraction = 1.0  # weight of KL(teacher ‖ student); the rest is cross-entropy on the data
    temperature: PositiveFloat = 1.0


@dataclasses.dataclass(frozen=True)
class Run:
    """Where the run lives and how often it reports and saves."""

    dir: str = "runs/lm"
    seed: Seed = 0
    log_every: PositiveInt = 10
    eval_every: PositiveInt = 200
    eval_batches: NotNegativeInt = 8
    checkpoint_every: PositiveInt = 100
    checkpoint_minutes: NotNegativeFloat = 0.0  # so long after the last one, too; 0: by steps alone
    keep: PositiveInt = 2
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    tensorboard: bool = False  # also write event files into dir/events
    wandb: str = ""  # also report to this project of Weights & Biases, by its own client


@dataclasses.dataclass(frozen=True)
class MeshSection:
    """All devices of the run take part; each holds its share of a batch's rows."""

    fsdp: PositiveInt = 1  # devices that share one copy of the params and the optimizer state
    devices: NotNegativeInt = 0  # the run must have, and --dry-run plans for; 0: those there are
    topology: str = ""  # of TPUs that --dry-run compiles for, e.g. v5e:2x4
    memory_gib: NotNegativeFloat = 0.0  # of one device, for --dry-run; 0: as the device says


@dataclasses.dataclass(frozen=True)
class LMConfig:
    """``python -m train.lm``: one section per concern."""

    model: Model = Model()
    data: DataSection = DataSection()
    tokenizer: TokenizerSection = TokenizerSection()
    optim: Optim = Optim()
    distill: Distill = Distill()
    mesh: MeshSection = MeshSection()
    run: Run = Run()

    def __post_init__(self):
        _check_batch(self)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The checkpoint to tune, and what of it is trained."""

    init_from: str = ""  # a Hugging Face directory, or an embedded model's name
    tokenizer: str = ""  # a tokenizer.json; by default the checkpoint's own
    # gated-lora: updates that act on adaptive tokens alone; exported as a delta to the checkpoint
    train: Literal["full", "embeddings", "lora", "gated-lora"] = "full"
    lora_rank: Width = 16
    lora_alpha: PositiveFloat = 32.0
    lora_matrices: tuple[Matrix, ...] = ()  # of each block; empty: all of them
    compute_dtype: ComputeDtype = "float32"  # of the forward pass; master weights: float32
    # recompute each block in the backward pass; attention: all but a long sequence's attention
    remat: Remat = False
    scan: bool = False  # compile one block and scan the layers: deep models compile sooner


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """SDSAT: which ids are adaptive, where they are put, and what they learn."""

    window: Annotated[int, whole(1, 1024)] = 5  # L
    ids: tuple[NotNegativeInt, ...] = ()  # empty: unused vocabulary, else new rows
    distinct: bool = False  # one id per place of the window, instead of one for all
    start_rate: BelowOne = 0.1  # 0 with loss basic: plain continued training, for comparison
    loss: Literal["basic", "improved", "isolated"] = "isolated"
    adaptive_targets: Literal["data", "self", "mix"] = "self"
    mix: Fraction = 0.5  # share of self targets in mix
    weight: NotNegativeFloat = 1.0  # w
    probe_length: Annotated[int, whole(0, 1024)] = (
        0  # adaptive tokens of a held-out window; 0: as window
    )
    decode_prompts: NotNegativeInt = 16  # held-out prompts that each evaluation continues greedily
    decode_tokens: PositiveInt = 64  # new tokens of each
    fim_rate: Fraction = 0.5  # documents rearranged for infilling; needs the sentinels

    @property
    def held_out_window(self) -> int:
        """k, the adaptive tokens of a held-out window."""
        return self.probe_length or self.window


@dataclasses.dataclass(frozen=True)
class SDSATConfig:
    """``python -m train.sdsat``: one section per concern."""

    model: Tuned = Tuned()
    data: DataSection = DataSection()
    sdsat: Adaptive = Adaptive()
    optim: Optim = Optim()
    mesh: MeshSection = MeshSection()
    run: Run = Run(dir="runs/sdsat")

    def __post_init__(self):
        _check_batch(self)


@dataclasses.dataclass(frozen=True)
class Watched:
    """The target whose hidden states a head reads; it is never changed."""

    init_from: str = ""  # a Hugging Face directory, or an embedded model's name
    tokenizer: str = ""  # a tokenizer.json; by default the target's own
    compute_dtype: ComputeDtype = "float32"  # of the forward pass
    remat: bool = False  # recompute each step of the head in the backward pass


@dataclasses.dataclass(frozen=True)
class HeadSection:
    """EAGLE-3: the head's sizes, and how many of its own outputs it is fed back."""

    draft_vocab: NotNegativeInt = 0  # the corpus's commonest ids; 0: all
    layers: tuple[NotNegativeInt, ...] = ()  # of the target that it reads; (): 2, n // 2, n − 3
    num_kv_heads: NotNegativeInt = 0  # 0: as the target
    intermediate_size: NotNegativeInt = 0  # 0: as the target
    norm_before_residual: bool = False
    steps: Annotated[int, whole(1, 16)] = 7  # K
    decay: Annotated[float, number(0, 1, above=True)] = 0.8  # β: step k weighs β^(k − 1)
    decode_prompts: NotNegativeInt = 16  # held-out prompts that each evaluation continues greedily
    decode_tokens: PositiveInt = 64  # new tokens of each


@dataclasses.dataclass(frozen=True)
class HeadRunConfig:
    """``python -m train.head``: one section per concern."""

    model: Watched = Watched()
    data: DataSection = DataSection()
    head: HeadSection = HeadSection()
    optim: Optim = Optim()
    mesh: MeshSection = MeshSection()
    run: Run = Run(dir="runs/head")

    def __post_init__(self):
        _check_batch(self)


def _check_batch(cfg: LMConfig | SDSATConfig | HeadRunConfig) -> None:
    """Raises InputError where a micro-batch has more tokens than an int32 counts."""
    tokens = cfg.optim.batch_size * cfg.data.seq_len
    if tokens > INT32_MAX:
        raise InputError(
            f"optim.batch_size={cfg.optim.batch_size} rows of data.seq_len={cfg.data.seq_len} are "
            f"{tokens} tokens, more than {INT32_MAX}: lower one"
        )


# What a resumed run may change: how far and how fast it goes on, where it runs, what it reports.
MAY_CHANGE = {
    "data": ("shards",),  # its tokens are what they were, or the digest tells
    "model": ("remat", "scan"),
    "sdsat": ("probe_length", "decode_prompts", "decode_tokens"),
    "head": ("decode_prompts", "decode_tokens"),
    "optim": (
        *("total_steps", "learning_rate", "muon_learning_rate", "weight_decay", "clip_norm"),
        *("schedule", "warmup_steps", "decay_fraction", "final_fraction"),
    ),
    "mesh": ("fsdp", "devices", "topology", "memory_gib"),
    "run": (
        *("dir", "log_every", "eval_every", "eval_batches", "checkpoint_every", "keep"),
        *("checkpoint_minutes", "export_dtype", "tensorboard", "wandb"),
    ),
}


def from_toml(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """The dataclass ``cls`` from a TOML file and ``section.key=value`` overrides.

    Raises:
      InputError: no such file, broken TOML, an unknown section or key, a wrong type or range.
    """
    return from_dict(cls, read_toml(path, overrides))


def read_toml(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The values of a TOML file and ``section.key=value`` overrides, unchecked.

    Raises:
      InputError: no such file, or broken TOML.
    """
    try:
        text = read_file(path)
    except (FileNotFoundError, IsADirectoryError):
        raise InputError(f"{path}: no such config file; configs/ holds examples") from None
    except OSError as error:
        raise InputError(f"cannot read the config {path}: {error.strerror}") from None
    if LONG_KEY.search(text):
        raise InputError(f"{path}: has a key of more than 16 parts; section.key has two")
    with foreign(f"{path}: not valid TOML", InputError):  # ValueError, RecursionError
        values = tomllib.loads(text.decode())
    for override in overrides:
        _apply(values, override)
    return values


def from_dict(cls: type[T], values: dict[str, Any], prefix: str = "") -> T:
    """The dataclass ``cls`` from nested dicts, as TOML and JSON give them.

    ``prefix`` is what stands before a key in the errors' names.

    Raises:
      InputError: an unknown section or key, a wrong type or range.
    """
    fields = inspect.get_annotations(cls, eval_str=True)
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; known: {', '.join(fields)}"
            raise InputError(f"unknown key {prefix}{key}{hint}")
    return cls(**{key: _value(fields[key], value, prefix + key) for key, value in values.items()})


def to_dict(cfg: Any) -> dict[str, Any]:
    """The config as :func:`from_dict` takes it: nested dicts that JSON can hold."""
    return json.loads(json.dumps(cfg, default=vars))


def fixed_settings(program: str, cfg: Any, model: Any, corpus: str) -> dict[str, Any]:
    """What a resumed run must not change, by name, as JSON gives it back.

    All of its config but :data:`MAY_CHANGE`; the model that a checkpoint makes of that, field by
    field; and the digest of the corpus's tokens, which the tokenizer and the layout decide, too.
    """
    kept = {
        section: {k: v for k, v in values.items() if k not in MAY_CHANGE.get(section, ())}
        for section, values in to_dict(cfg).items()
    }
    made = {"architecture": to_dict(model), "corpus": {"sha256": corpus}}
    return dict(_flat({"program": program} | kept | made))


def require_same(began: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises InputError where a setting is not what it was; one newer than the run had no say."""
    for name, value in began.items():
        if now.get(name) != value:
            raise InputError(
                f"--resume: {name} is {now.get(name)!r}, the run began with {value!r}; set it "
                "back, or start a new run in another run.dir"
            )


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _apply(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot or not key:
        raise InputError(
            f"--set {quoted(override)}: expected section.key=value, e.g. optim.total_steps=9"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    except (ValueError, RecursionError):
        raise InputError(
            f"--set {quoted(override)}: too long a number, or too deep a list"
        ) from None
    if not isinstance(values.setdefault(section, {}), dict):
        raise InputError(f"--set {quoted(override)}: {section!r} is no section")
    values[section][key] = value


def _value(kind: Any, value: Any, name: str) -> Any:
    """The value as a field of type ``kind`` takes it."""

    def require(holds: bool, expected: str) -> None:
        if not holds:
            raise InputError(f"{name}={quoted(value)}: expected {expected}")

    if dataclasses.is_dataclass(kind):
        require(isinstance(value, dict), f"a section [{name}]")
        return from_dict(kind, value, f"{name}.")
    checks, choices = (), ()
    if get_origin(kind) in (Union, UnionType):  # bool | Literal
        if isinstance(value, bool):
            return value
        names = [name for one in get_args(kind) for name in get_args(one)]
        require(value in names, f"one of true, false, {', '.join(names)}")
        return value
    if get_origin(kind) is Annotated:
        kind, *checks = get_args(kind)
    elif get_origin(kind) is Literal:
        kind, choices = str, get_args(kind)
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        strings = item is str or get_origin(item) is Literal
        items = "strings" if strings else "numbers" if item is PositiveFloat else "integers"
        require(isinstance(value, list), f"a list of {items}")
        return tuple(_value(item, one, name) for one in value)
    is_number = kind is float and type(value) is int
    require(is_number or type(value) is kind, f"{kind.__name__}, got {type(value).__name__}")
    require(kind is not str or "\0" not in value, "a text without NUL")
    require(not choices or value in choices, f"one of {', '.join(choices)}")
    for check in checks:
        require(check.holds(value), check.says)
    return kind(value)
