"""A language model ready to decode: params in the inference layout, config, tokenizer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax._util.arguments import FLAG, ArgSpec, an, shown, validate_arguments, whole_numbers
from specjax._util.checks import require_all
from specjax._util.errors import ModelError, OptionError, PairError, foreign
from specjax.core.net import FREE_TOKENS, Net
from specjax.demo import tuned
from specjax.models import ModelConfig, fuse, load_pretrained
from specjax.models.adapters import KEY, fuse_adapters
from specjax.models.config import as_ids
from specjax.models.families.head import HeadConfig, usual_layers
from specjax.models.head import share_embedding
from specjax.models.hf.config import token_ids
from specjax.models.hf.delta import load_delta, read_delta
from specjax.models.hf.files import read_json
from specjax.models.hf.layout import DELTA, DTYPES
from specjax.models.hf.read import load_config
from specjax.models.placement import param_specs, place, place_adapters
from specjax.models.quantize import parse_scheme, quantize_params
from specjax.models.sharding import AXIS, split_config
from specjax.text.tokenizer import Tokenizer

DEMO = Path(__file__).parent / "demo"
EMBEDDED = {"demo": DEMO / "target", "demo-draft": DEMO / "draft", "demo-head": DEMO / "head"}
TUNED = "demo-sdsat"
HUB_FILES = ("*.json", "model*.safetensors", "delta.safetensors", "*.jinja", "tokenizer.model")
PICKLES = ("pytorch_model*.bin",)
HUB_SKIPPED = ("*/*",)  # other formats of the same weights
SELF = "self:"  # begins the name of a draft that is the target's own copy, by its scheme
ACCELERATOR_WIDTH = 8  # tokens of a narrow pass: the rows of a matrix unit's tile
PASS_WIDTH = ArgSpec(int, low=1, high=FREE_TOKENS, optional=True)
CACHE_DTYPE = ArgSpec(an(str), wanted="int8", choices=("int8",), optional=True)


@dataclasses.dataclass(frozen=True, eq=False)
class LM:
    """A loaded model. ``tokenizer`` is None for models made from bare params.

    ``vocab_limit``: ids from here on are padding of the vocabulary and are never drawn. On a
    ``mesh`` of several devices, ``config`` describes one device's share. ``pass_width``,
    ``cache_dtype`` and ``adapters``: see :class:`specjax.core.net.Net`.
    """

    config: ModelConfig
    params: dict
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    vocab_limit: int
    source: str
    mesh: Mesh | None = None
    pass_width: int = 1
    cache_dtype: str | None = None
    adapters: dict = dataclasses.field(default_factory=dict)

    @property
    def is_head(self) -> bool:
        """Whether it drafts from a target's hidden states, and is no model by itself."""
        return isinstance(self.config, HeadConfig)

    @property
    def net(self) -> Net:
        """The model as decoding runs it."""
        static = self.config.vocab_size, self.vocab_limit, self.pass_width, self.cache_dtype
        return Net(self.params, self.config, *static, self.adapters)

    @property
    def dtype(self) -> jnp.dtype:
        return self.params["head" if self.is_head else "embed"].dtype


QUANTIZE = ArgSpec(an(str), wanted="a scheme, such as int8", optional=True)
MODEL = ArgSpec(an(LM), wanted="a model, as specjax.load and specjax.from_params give")
TARGET = dataclasses.replace(
    MODEL,
    fits=lambda model: not model.is_head,
    wanted=f"{MODEL.wanted}; a head on hidden states can only draft: give it as the draft",
)
MESH = ArgSpec(an(Mesh), wanted="a mesh, as specjax.make_mesh gives")


@validate_arguments(
    path_or_id=ArgSpec(
        lambda path: an(str)(os.fspath(path)), wanted="a directory, or a model's name"
    ),
    pickles=FLAG,
    mesh=dataclasses.replace(MESH, optional=True),
    split=FLAG,
    pass_width=PASS_WIDTH,
    quantize=QUANTIZE,
    cache_dtype=CACHE_DTYPE,
)
def load(
    path_or_id: str | Path,
    dtype: str | None = None,
    pickles: bool = False,
    mesh: Mesh | None = None,
    split: bool = True,
    pass_width: int | None = None,
    quantize: str | None = None,
    cache_dtype: str | None = None,
) -> LM:
    """Loads a model directory, a hub id, an embedded model, or a delta beside one of these.

    Embedded are ``demo``, its ``demo-draft``, ``demo-head``, which drafts from its hidden states,
    and ``demo-sdsat``, which drafts for itself.

    Args:
      dtype: ``float32``, ``bfloat16`` or ``float16``. None: float32 on CPUs, which compute in
        it fastest, bfloat16 elsewhere.
      pickles: read ``pytorch_model*.bin`` where there are no safetensors; needs the torch
        extra. Only tensors are read: no code in the pickle runs.
      mesh: several devices (:func:`specjax.make_mesh`); layer by layer, each gets its share.
      split: False: each device gets a whole copy, which needs no sums between them. Draft and
        target lie on the same mesh, each split or whole.
      pass_width: tokens a row of a narrow pass, 1 to 128; None: 8 on accelerators, where they cost
        nothing, 1 on CPUs. Wider than the drafts, greedy output in bfloat16 is plain decoding's.
      quantize: ``int8``, ``fp8``, ``int4`` or ``int4:GROUP``: keep the weights so, layer by layer
        as they are read (:mod:`specjax.models.quantize`). What ``infer.convert --quantize`` wrote
        is quantized without it.
      cache_dtype: ``int8``: keep keys and values so, with a scale per token and head
        (:mod:`specjax.models.coded`); None: in the model's dtype.
    Raises:
      ModelError: the directory, id or dtype cannot be used; the message says why.
      OptionError: an argument is of another type.
    """
    dtype = resolve_dtype(dtype)
    pass_width = resolve_pass_width(pass_width)
    own = locate(str(path_or_id), HUB_FILES + PICKLES * pickles)
    delta = read_delta(own)
    directory = own if delta is None else locate(delta.base)
    # The small files first: what is wrong with them is said before gigabytes are read.
    config = load_config(directory)
    eos_ids = _eos_ids(directory, config)
    head = isinstance(config, HeadConfig)  # its tokenizer is the target's
    tokenizer = None if head else Tokenizer.from_directory(directory)
    adapters = {}
    if delta is not None:
        adapters = fuse_adapters(config, load_delta(own, delta, directory, config, DTYPES[dtype]))
    if mesh is not None:
        adapters = place_adapters(config, adapters, mesh, split)
    placed = None if mesh is None else functools.partial(place, mesh=mesh, split=split)
    config, params = load_pretrained(directory, DTYPES[dtype], True, pickles, placed, quantize)
    if delta is not None:
        config = dataclasses.replace(config, adaptive_ids=delta.adaptive_ids)
    config, source = _share(config, mesh, split), str(path_or_id)
    how = {"pass_width": pass_width, "cache_dtype": cache_dtype, "adapters": adapters}
    return _assemble(config, params, tokenizer, eos_ids, source, mesh=mesh, **how)


@validate_arguments(model=MODEL, mesh=MESH, split=FLAG)
def on_mesh(model: LM, mesh: Mesh, split: bool = True) -> LM:
    """A model that lies on one device, on several; arguments as in :func:`load`.

    Raises:
      ModelError: it lies on a mesh already, or cannot be split.
    """
    if model.mesh is not None:
        raise ModelError(f"{model.source} lies on a mesh already; load it anew")
    config = _share(model.config, mesh, split)
    params = place(model.config, model.params, mesh, split)
    adapters = place_adapters(model.config, model.adapters, mesh, split)
    return dataclasses.replace(model, config=config, params=params, adapters=adapters, mesh=mesh)


@validate_arguments(model=MODEL, scheme=QUANTIZE)
def quantize(model: LM, scheme: str) -> LM:
    """A model with its weights quantized, where they lie; what stays as it is, both share.

    Such a copy is a draft that follows the model closely, and any lossless rule makes the model's
    own law of it: what ``draft="self:int4"`` stands for.

    Raises:
      ModelError: there is no such scheme, or it does not fit the model.
    """
    config = model.config
    params = quantize_params(config, model.params, parse_scheme(scheme), model.dtype)
    if model.mesh is not None:
        specs = PartitionSpec()
        if config.shards > 1:
            specs = param_specs(config, params, config.shards)
        places = jax.tree.map(lambda spec: NamedSharding(model.mesh, spec), specs)
        params = jax.device_put(params, places)
    return dataclasses.replace(model, params=params, source=f"{model.source}, {scheme}")


def own_draft(target: LM, name: str) -> LM:
    """The draft that ``self:SCHEME`` names.

    Raises:
      OptionError: it is another name.
      ModelError: the scheme does not fit the model.
    """
    if not name.startswith(SELF):
        raise OptionError(
            f"draft={shown(name)}: expected a model, or {SELF}int4, {SELF}int8, {SELF}fp8: the "
            "target's own copy"
        )
    return dataclasses.replace(quantize(target, name.removeprefix(SELF)), source=name)


def attach(head: LM, target: LM) -> LM:
    """A head that knows its target: which layers it reads, and an embedding.

    Raises:
      PairError: it is a head for another target.
    """
    cfg, own = head.config, target.config
    made = f" (it was made for {cfg.verifier})" if cfg.verifier else ""
    for what, reads, has in (
        ("hidden states of size", cfg.target_size, own.hidden_size),
        ("a vocabulary of", cfg.vocab_size, own.vocab_size),
    ):
        if reads != has:
            raise PairError(
                f"head {head.source} is for {what} {reads}, target {target.source} has {has}{made}"
            )
    layers = cfg.layer_ids or usual_layers(own)
    if max(layers) >= own.num_layers:
        raise PairError(
            f"head {head.source} reads layer {max(layers)}, target {target.source} has layers 0 to "
            f"{own.num_layers - 1}{made}"
        )
    width = own.embed_size or own.hidden_size
    if not cfg.own_embedding and width != cfg.hidden_size:
        raise PairError(
            f"head {head.source} has no embedding, and the target's is {width} wide, not "
            f"{cfg.hidden_size}"
        )
    cfg = dataclasses.replace(cfg, layer_ids=layers, adaptive_ids=own.adaptive_ids)
    cfg, params = share_embedding(cfg, head.params, target.params["embed"])
    return dataclasses.replace(head, config=cfg, params=params)


def can_split(path_or_id: str | Path, mesh: Mesh) -> bool:
    """Whether a model's heads and MLP columns divide among the devices of a mesh.

    Raises:
      ModelError: the model has no config that can be used.
    """
    config = load_config(base_of(str(path_or_id), ("config.json",)))
    try:
        split_config(config, mesh.shape[AXIS])
    except ModelError:
        return False
    return True


def _share(config: ModelConfig, mesh: Mesh | None, split: bool) -> ModelConfig:
    return split_config(config, mesh.shape[AXIS]) if mesh is not None and split else config


def resolve_dtype(dtype: Any) -> str:
    """The name of the dtype that :func:`load` keeps weights in.

    Raises:
      ModelError: there is no such dtype.
    """
    if dtype is None:
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"
    with contextlib.suppress(TypeError):
        dtype = jnp.dtype(dtype).name
    if dtype not in tuple(DTYPES):
        raise ModelError(f"dtype {shown(dtype)!r} is not supported; choose {', '.join(DTYPES)}")
    return dtype


def resolve_pass_width(width: int | None) -> int:
    """The tokens a row that :func:`load` makes narrow passes of."""
    if width is None:
        return 1 if jax.default_backend() == "cpu" else ACCELERATOR_WIDTH
    return width


@validate_arguments(
    config=ArgSpec(an(ModelConfig), wanted="a specjax.models.ModelConfig"),
    params=ArgSpec(an(Mapping), wanted="a dict of arrays, as specjax.models.init_params gives"),
    tokenizer=ArgSpec(an(Tokenizer), wanted="a specjax.text.Tokenizer", optional=True),
    eos_ids=ArgSpec(lambda ids: tuple(whole_numbers(ids).tolist()), wanted="token ids"),
    pass_width=PASS_WIDTH,
    cache_dtype=CACHE_DTYPE,
)
def from_params(
    config: ModelConfig,
    params: dict,
    tokenizer: Tokenizer | None = None,
    eos_ids: tuple[int, ...] = (),
    pass_width: int | None = None,
    cache_dtype: str | None = None,
) -> LM:
    """An :class:`LM` from params in memory; without a tokenizer prompts are token ids.

    Among the params may be adapters (:mod:`specjax.models.adapters`).
    """
    eos_ids, pass_width = eos_ids or config.eos_ids, resolve_pass_width(pass_width)
    adapters = fuse_adapters(config, params[KEY]) if KEY in params else {}
    params = fuse({name: part for name, part in params.items() if name != KEY})
    how = {"pass_width": pass_width, "cache_dtype": cache_dtype, "adapters": adapters}
    return _assemble(config, params, tokenizer, eos_ids, "params", **how)


def _assemble(config, params, tokenizer, eos_ids, source, **how) -> LM:
    known = tokenizer.vocab_size if tokenizer else config.vocab_size
    limit = min(known, config.vocab_size)
    return LM(config, params, tokenizer, eos_ids, limit, source, **how)


def locate(name: str, files: Sequence[str] = HUB_FILES) -> Path:
    """The directory of a model, fetched from the hub where it is an id: of it, ``files`` alone.

    Raises:
      ModelError: the hub does not give it.
    """
    if name in EMBEDDED:
        return EMBEDDED[name]
    if name == TUNED:
        return tuned.directory()
    path = Path(name)
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        return path.expanduser()
    return _from_hub(name, files)


def base_of(name: str, files: Sequence[str] = HUB_FILES) -> Path:
    """The directory that holds a model's config and weights: of a delta, its base's."""
    directory = locate(name, (*files, DELTA))
    delta = read_delta(directory)
    return directory if delta is None else locate(delta.base, files)


def lasting(name: str) -> str:
    """The name of a model as another process finds it, wherever that one runs on this machine."""
    here = name not in (*EMBEDDED, TUNED) and Path(name).exists()
    return str(Path(name).resolve()) if here else name


def _from_hub(name: str, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    with foreign(f"{name}: no such directory here, and the hub did not give it"):
        skipped = list(HUB_SKIPPED)
        return Path(snapshot_download(name, allow_patterns=list(files), ignore_patterns=skipped))


def _eos_ids(directory: Path, config: ModelConfig) -> tuple[int, ...]:
    """End-of-sequence ids: the generation config knows more of them than the model's."""
    path = directory / "generation_config.json"
    settings = read_json(path)
    known = {"eos_token_id": token_ids(config.vocab_size)}
    require_all(f"{path}: ", settings, known, ModelError)
    return as_ids(settings.get("eos_token_id")) or config.eos_ids
