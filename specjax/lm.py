"""Loads language models: params in the inference layout, config and tokenizer, as one ``LM``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax._util.arguments import FLAG, as_integer_array, instance_of, validate_arguments
from specjax._util.checks import Check, format_value
from specjax._util.errors import ModelError, ModelWarning, OptionError, PairError, SplitError
from specjax._util.files import expand_user
from specjax._util.platform import platform
from specjax.core.mesh import with_both_axes
from specjax.core.net import FREE_TOKENS, Net
from specjax.demo import tuned
from specjax.models import ModelConfig, fuse
from specjax.models.adapters import KEY, fuse_adapters
from specjax.models.families.head_config import HeadConfig, usual_layers
from specjax.models.gguf.header import ENDING, is_gguf
from specjax.models.gguf.packages import PACKAGES, packaged_file
from specjax.models.head import share_embedding
from specjax.models.hf import hub
from specjax.models.hf.delta import Delta, load_delta, read_delta
from specjax.models.hf.digest import directory_digest, file_digest
from specjax.models.hf.generation import GenerationDefaults, read_generation_defaults
from specjax.models.hf.layout import DELTA, DTYPES
from specjax.models.loading import load_config, load_params
from specjax.models.placement import param_specs, place, place_adapters
from specjax.models.quantization import parse_scheme, quantize_params
from specjax.models.quantized import is_quantized
from specjax.models.sharding import AXIS, split_config
from specjax.text.tokenizer import Tokenizer

DEMO = Path(__file__).parent / "demo"
EMBEDDED = {
    "demo": DEMO / "target",
    "demo-draft": DEMO / "draft",
    "demo-head": DEMO / "head",
    "smollm2-head": DEMO / "smollm2_head",
}
TUNED = "demo-sdsat"
# Tokenizers without a tokenizer.json: SentencePiece's model, or the text files of OPT's and BERT's.
TOKENIZER_FILES = ("tokenizer.model", "merges.txt", "vocab.txt")
HUB_FILES = ("*.json", hub.SAFETENSORS, "delta.safetensors", "*.jinja", *TOKENIZER_FILES)
PICKLES = (hub.PICKLES,)
# A directory of the hub's cache: models--ORGANIZATION--NAME/snapshots/COMMIT.
HUB_SNAPSHOT = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/[0-9a-f]+/?$")
SELF = "self:"  # prefix of a draft that is a quantized copy of the target; a scheme follows
PASS_WIDTH = Check(int, low=1, high=FREE_TOKENS, optional=True)
CACHE_DTYPE = Check(instance_of(str), choices=("int8",), optional=True)


@dataclasses.dataclass(frozen=True, eq=False)
class LM:
    """A loaded model, ready to decode.

    Attributes:
      config: its architecture. On a mesh of several devices, that of one device's share.
      params: a nested dict of arrays, in the inference layout.
      tokenizer: None for models made from bare params.
      eos_ids: ids that end a sequence.
      vocab_limit: ids from here on are padding of the vocabulary and are never drawn.
      source: the name or path it was loaded by; messages show it.
      mesh: the devices it is on; None: one device.
      pass_width, cache_dtype, adapters: see :class:`specjax.core.net.Net`.
      generation_defaults: what the checkpoint's generation_config.json asks for. Decoding does not
        read it; ``sj.Sampling(**model.generation_defaults.sampling)`` is its sampling.
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
    generation_defaults: GenerationDefaults = dataclasses.field(default_factory=GenerationDefaults)

    def __repr__(self) -> str:
        """One line, without the params: ``LM('demo', llama, 8.7M params, float32)``."""
        size = _count_text(_num_params(self.params))
        return f"LM({self.source!r}, {self.config.family}, {size} params, {self.dtype})"

    @property
    def is_head(self) -> bool:
        """Whether it is a head: it can only draft, from a target's hidden states."""
        return isinstance(self.config, HeadConfig)

    @property
    def net(self) -> Net:
        """The model as decoding runs it."""
        return Net(
            self.params,
            self.config,
            vocab=self.config.vocab_size,
            vocab_limit=self.vocab_limit,
            pass_width=self.pass_width,
            cache_dtype=self.cache_dtype,
            adapters=self.adapters,
        )

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations; quantized weights count as this one, too."""
        return self.params["head" if self.is_head else "embed"].dtype


NAME = "a directory, or a model's name"
QUANTIZE = Check(instance_of(str), expected="a scheme, such as int8", optional=True)
MODEL = Check(instance_of(LM), expected="a model, as specjax.load and specjax.from_params give")
TARGET = dataclasses.replace(
    MODEL,
    fits=lambda model: not model.is_head,
    expected=f"{MODEL.expected}; a head on hidden states can only draft: give it as the draft",
)
MESH = Check(instance_of(Mesh), expected="a mesh, as specjax.make_mesh or jax.make_mesh gives")


@validate_arguments(
    path_or_id=Check(lambda path: instance_of(str)(os.fspath(path)), expected=NAME),
    pickles=FLAG,
    mesh=dataclasses.replace(MESH, optional=True),
    split=FLAG,
    pass_width=PASS_WIDTH,
    quantize=QUANTIZE,
    cache_dtype=CACHE_DTYPE,
    base=Check(lambda path: instance_of(str)(os.fspath(path)), expected=NAME, optional=True),
    revision=Check(instance_of(str), expected="a branch, a tag or a commit", optional=True),
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
    base: str | Path | None = None,
    revision: str | None = None,
) -> LM:
    """Loads a model: a directory, a hub id, a GGUF file, an embedded model, or a delta.

    A GGUF file needs the gguf extra. ``smollm2`` and ``gemma3-270m`` name the GGUF files of
    packages on PyPI; the error says what to install. Embedded models are ``demo``, ``demo-draft``,
    ``demo-head``, which drafts from demo's hidden states, ``demo-sdsat``, which drafts for itself,
    and ``smollm2-head``, a head for ``smollm2``.

    Args:
      path_or_id: a directory, a GGUF file, an id on the Hugging Face hub, or a model's name.
      dtype: ``float32``, ``bfloat16`` or ``float16``. None: float32 on CPUs, where it is fastest,
        and bfloat16 elsewhere.
      quantize: ``int8``, ``fp8``, ``int4`` or ``int4:GROUP``: quantizes the weights layer by layer
        (:mod:`specjax.models.quantization`). Checkpoints that are quantized already need no
        scheme: they keep their codes. ``none`` dequantizes what another library quantized.
      cache_dtype: ``int8``: the KV cache is int8, with a scale per token and head
        (:mod:`specjax.models.quantized_cache`). None: it has the model's dtype.
      pass_width: tokens per row, N, that short passes are padded to, 1 to 128. None: 8 on
        accelerators, where it is free, and 1 on CPUs. With up to 128 / N rows prompts are prefilled
        one by one, and greedy bfloat16 equals plain decoding for chains shorter than N, not trees.
      mesh: load onto several devices, layer by layer: a mesh with axes ``data``, ``model`` or both.
      split: each device of the mesh gets a share of the weights. False: each gets a whole copy.
        Draft and target must be on the same mesh; each may be split or whole.
      pickles: read ``pytorch_model*.bin`` where there are no safetensors. No code in the pickle
        runs. Needs the torch extra.
      base: of a delta: the model that it was made for, instead of the one that it names. Its
        fingerprint decides whether it is that model.
      revision: of a hub id: a branch, tag or commit; ``ORGANIZATION/NAME@REVISION`` is the same.
    Raises:
      ModelError: the directory, id or dtype cannot be used; the message says why.
      OptionError: an argument has a wrong type or is out of range.
    """
    name = str(path_or_id)
    if revision is not None:
        name = hub.with_revision(name, revision)
    base = None if base is None else str(base)
    model = _load(name, resolve_dtype(dtype), pickles, mesh, split, quantize, base)
    pass_width = resolve_pass_width(pass_width)
    return dataclasses.replace(model, pass_width=pass_width, cache_dtype=cache_dtype)


def _load(
    name: str,
    dtype: str,
    pickles: bool,
    mesh: Mesh | None,
    split: bool,
    quantize: str | None,
    base: str | None,
) -> LM:
    """Reads the files for :func:`load`, which then sets ``pass_width`` and ``cache_dtype``."""
    mesh = None if mesh is None else with_both_axes(mesh)
    model_directory = locate(name, (*HUB_FILES, *PICKLES) if pickles else HUB_FILES)
    delta = read_delta(model_directory)
    if delta is not None:
        directory = _base_directory(model_directory, delta, base)
    elif base is None:
        directory = model_directory
    else:
        raise ModelError(f"base={base}: {name} is no delta, so it has no base; leave it out")

    # The small files first: their errors are raised before gigabytes are read.
    config = load_config(directory)
    generation = read_generation_defaults(directory, config.vocab_size)
    tokenizer = None
    if not isinstance(config, HeadConfig):  # a head uses its target's tokenizer
        tokenizer = read_tokenizer(directory)
    adapters = {}
    if delta is not None:
        plain = load_delta(model_directory, delta, directory, config, DTYPES[dtype])
        adapters = fuse_adapters(config, plain)
        _warn_of_template(name, delta, tokenizer)
    place_part = None
    if mesh is not None:
        adapters = place_adapters(config, adapters, mesh, split)
        place_part = functools.partial(place, mesh=mesh, split=split)

    config, params = load_params(directory, DTYPES[dtype], pickles, place_part, quantize)
    if delta is not None:
        config = dataclasses.replace(config, adaptive_ids=delta.adaptive_ids)
    return LM(
        config=_device_config(config, mesh, split),
        params=params,
        tokenizer=tokenizer,
        eos_ids=_eos_ids(generation, config, tokenizer),
        vocab_limit=_vocab_limit(config, tokenizer),
        source=name,
        mesh=mesh,
        adapters=adapters,
        generation_defaults=generation,
    )


def _warn_of_template(name: str, delta: Delta, tokenizer: Tokenizer | None) -> None:
    """Warns if adapters were tuned on conversations of another chat template than the model's."""
    own = tokenizer.template_digest if tokenizer else ""
    if delta.chat_template and delta.chat_template != own:
        warnings.warn(
            f"{name} was tuned with another chat template than the model has now: it drafts worse "
            "in chats; take its template, or tune it with this one (data.chat_template)",
            ModelWarning,
            stacklevel=2,
        )


@validate_arguments(model=MODEL, mesh=MESH, split=FLAG)
def on_mesh(model: LM, mesh: Mesh, split: bool = True) -> LM:
    """Moves a model from one device to several; arguments as in :func:`load`.

    Raises:
      ModelError: it is on a mesh already, or cannot be split.
      OptionError: the mesh has other axes.
    """
    mesh = with_both_axes(mesh)
    if model.mesh is not None:
        raise ModelError(f"{model.source} is on a mesh already; load it again")
    config = _device_config(model.config, mesh, split)
    params = place(model.config, model.params, mesh, split)
    adapters = place_adapters(model.config, model.adapters, mesh, split)
    return dataclasses.replace(model, config=config, params=params, adapters=adapters, mesh=mesh)


@validate_arguments(model=MODEL, scheme=QUANTIZE)
def quantize(model: LM, scheme: str) -> LM:
    """A copy of a model with quantized weights, on the same devices.

    Arrays that are not quantized are shared with the model. Such a copy is a good draft model: its
    distribution is close to the model's. With a lossless rule the output keeps the model's
    distribution. ``draft="self:int4"`` makes such a copy.

    Args:
      scheme: ``int8``, ``fp8``, ``int4`` or ``int4:GROUP``.
    Raises:
      ModelError: there is no such scheme, or it does not fit the model.
    """
    config = model.config
    mesh = model.mesh
    params = quantize_params(config, model.params, parse_scheme(scheme), model.dtype)
    if mesh is not None:
        specs = PartitionSpec()  # a whole copy on each device
        if config.shards > 1:
            specs = param_specs(config, params, config.shards)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        params = jax.device_put(params, shardings)
    return dataclasses.replace(model, params=params, source=f"{model.source}, {scheme}")


def own_draft(target: LM, name: str) -> LM:
    """The draft that ``self:SCHEME`` names: a quantized copy of the target.

    Raises:
      OptionError: the name does not begin with ``self:``.
      ModelError: the scheme does not fit the model.
    """
    if not name.startswith(SELF):
        raise OptionError(
            f"draft={format_value(name)}: expected a model, or {SELF}int4, {SELF}int8 or "
            f"{SELF}fp8, a quantized copy of the target"
        )
    return dataclasses.replace(quantize(target, name.removeprefix(SELF)), source=name)


def load_draft(
    name: str, target: LM, *, whole: bool = False, base: str | None = None, **options: Any
) -> LM:
    """The draft model of that name, on the target's devices.

    If they cannot share it, it is whole on each of them, and a :class:`ModelWarning` says so.

    Args:
      name: as :func:`load` takes it, or ``self:SCHEME``.
      whole: it is whole on each device, even if they can share it.
      base: that of :func:`load`, for the draft; of ``self:SCHEME`` for the target.
      options: of :func:`load`, those that the target was loaded with.

    Raises:
      ModelError: it cannot be loaded.
    """
    is_copy = name.startswith(SELF)
    if not whole or target.mesh is None:
        try:
            if is_copy:
                return own_draft(target, name)
            return load(name, base=base, **options)
        except SplitError as error:
            warnings.warn(f"{name} is whole on each device: {error}", ModelWarning, stacklevel=2)
    if not is_copy:
        return load(name, split=False, base=base, **options)
    # A share of each weight is not enough for a whole copy, so the files are read again.
    options["quantize"] = name.removeprefix(SELF)
    copy = load(target.source, split=False, base=base, **options)
    return dataclasses.replace(copy, source=name)


def attach(head: LM, target: LM) -> LM:
    """A head completed from its target: with the layers to read, and an embedding if it has none.

    Raises:
      PairError, ModelError: as :func:`fit_head`.
    """
    cfg = head.config
    assert isinstance(cfg, HeadConfig), "only heads are attached"
    cfg = fit_head(cfg, f"head {head.source}", target.config, f"target {target.source}")
    cfg = dataclasses.replace(cfg, adaptive_ids=target.config.adaptive_ids)
    cfg, params = share_embedding(cfg, head.params, target.params["embed"])
    return dataclasses.replace(head, config=cfg, params=params)


def fit_head(head: HeadConfig, head_name: str, target: ModelConfig, target_name: str) -> HeadConfig:
    """A head's config with the layers that it reads of this target.

    Args:
      head_name, target_name: for messages.

    Raises:
      PairError: its sizes or layers do not fit the target, so it is a head for another one.
      ModelError: it names no layers, and the target has too few for the usual ones.
    """
    made_for = f" (it was made for {head.verifier})" if head.verifier else ""
    for what, expected, actual in (
        ("hidden states of size", head.target_size, target.hidden_size),
        ("a vocabulary of", head.vocab_size, target.vocab_size),
    ):
        if expected != actual:
            raise PairError(
                f"{head_name} is for {what} {expected}, {target_name} has {actual}{made_for}"
            )
    layers = head.layer_ids or usual_layers(target)
    if max(layers) >= target.num_layers:
        raise PairError(
            f"{head_name} reads layer {max(layers)}, {target_name} has layers 0 to "
            f"{target.num_layers - 1}{made_for}"
        )
    embed_size = target.embed_size or target.hidden_size
    if not head.own_embedding and embed_size != head.hidden_size:
        raise PairError(
            f"{head_name} has no embedding, and the target's is {embed_size} wide, not "
            f"{head.hidden_size}"
        )
    return dataclasses.replace(head, layer_ids=layers)


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model: of a directory, or of a GGUF file.

    Raises:
      ModelError: there is none, or it cannot be read.
    """
    if is_gguf(path):
        return Tokenizer.from_gguf(path)
    return Tokenizer.from_directory(path)


def _device_config(config: ModelConfig, mesh: Mesh | None, split: bool) -> ModelConfig:
    """The config of one device's share; the model's own where it is not split."""
    if mesh is None or not split:
        return config
    return split_config(config, mesh.shape[AXIS])


def _vocab_limit(config: ModelConfig, tokenizer: Tokenizer | None) -> int:
    """The number of ids that can be drawn: those that tokenizer and model both have."""
    if tokenizer is None:
        return config.vocab_size
    return min(tokenizer.vocab_size, config.vocab_size)


def resolve_dtype(dtype: Any) -> str:
    """The ``dtype`` of :func:`load`, as a name: the given one, or the default.

    Raises:
      ModelError: there is no such dtype.
    """
    if dtype is None:
        return platform().dtype
    # NumPy parses a text as an expression; what it raises then says nothing to the user.
    with contextlib.suppress(TypeError, ValueError, SyntaxError):
        dtype = jnp.dtype(dtype).name
    if dtype not in tuple(DTYPES):
        raise ModelError(
            f"dtype {format_value(dtype)!r} is not supported; choose {', '.join(DTYPES)}"
        )
    return dtype


def resolve_pass_width(width: int | None) -> int:
    """The ``pass_width`` of :func:`load`, in tokens per row: the given one, or the default."""
    if width is not None:
        return width
    return platform().pass_width


@validate_arguments(
    config=Check(instance_of(ModelConfig), expected="a specjax.models.ModelConfig"),
    params=Check(
        instance_of(Mapping), expected="a dict of arrays, as specjax.models.init_params gives"
    ),
    tokenizer=Check(instance_of(Tokenizer), expected="a specjax.text.Tokenizer", optional=True),
    eos_ids=Check(lambda ids: tuple(as_integer_array(ids).tolist()), expected="token ids"),
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
    """An :class:`LM` from params in memory.

    Args:
      config: the architecture of the params.
      params: as :func:`specjax.models.init_params` gives them, perhaps with adapters
        (:mod:`specjax.models.adapters`).
      tokenizer: None: prompts are token ids.
      eos_ids: ids that end a sequence; empty: the config's.
      pass_width, cache_dtype: as in :func:`load`.
    Raises:
      OptionError: an argument has a wrong type or is out of range.
    """
    adapters = {}
    if KEY in params:
        adapters = fuse_adapters(config, params[KEY])
    params = fuse({name: part for name, part in params.items() if name != KEY})
    return LM(
        config=config,
        params=params,
        tokenizer=tokenizer,
        eos_ids=eos_ids or config.eos_ids,
        vocab_limit=_vocab_limit(config, tokenizer),
        source="params",
        pass_width=resolve_pass_width(pass_width),
        cache_dtype=cache_dtype,
        adapters=adapters,
    )


def locate(name: str, files: Sequence[str] = HUB_FILES) -> Path:
    """The directory of a model; a hub id is downloaded first, but only its ``files``.

    Raises:
      ModelError: the hub does not give it.
    """
    if name in EMBEDDED:
        return EMBEDDED[name]
    if name == TUNED:
        return tuned.directory()
    if name in PACKAGES:
        return packaged_file(name)
    # What is no hub id is a path, whether it exists or not.
    if not hub.is_id(name) or name.endswith(ENDING) or os.path.exists(name):
        return expand_user(name)
    return hub.download(name, files)


def is_delta(name: str) -> bool:
    """Whether a model's directory holds a delta.

    Raises:
      ModelError: the hub does not give it, or its ``delta.json`` is wrong.
    """
    return read_delta(locate(name)) is not None


def base_of(name: str, files: Sequence[str] = HUB_FILES, base: str | None = None) -> Path:
    """The directory with a model's config and weights; for a delta, the one of its base.

    ``base`` is that of :func:`load`; it counts for deltas only.

    Raises:
      ModelError: the hub does not give it, or its ``delta.json`` is wrong.
    """
    directory = locate(name, (*files, DELTA))
    delta = read_delta(directory)
    return directory if delta is None else _base_directory(directory, delta, base, files)


def _base_directory(
    directory: Path, delta: Delta, base: str | None, files: Sequence[str] = HUB_FILES
) -> Path:
    """The directory of the base of the delta in ``directory``: ``base``, or what it names.

    Raises:
      ModelError: it is not there.
    """
    if base is not None:
        return locate(base, files)
    if not delta.base.startswith("."):
        return locate(delta.base, files)
    found = directory / delta.base
    if not found.exists():
        raise ModelError(
            f"{directory}: its base {delta.base} is not there: name it with --base DIR or "
            "load(…, base=)"
        )
    return found


def model_digest(name: str, base: str | None = None) -> str:
    """SHA-256 of a model's files (:mod:`specjax.models.hf.digest`); of a delta and of its base.

    The draft ``self:int8`` is the target in another form, so it has no files of its own. ``base``
    is that of :func:`load`; it counts for deltas only.

    Raises:
      ModelError: the model is not there, or a file cannot be read.
    """
    if name.startswith(SELF):
        return hashlib.sha256(name.encode()).hexdigest()
    directory = locate(name)
    if is_gguf(directory):
        return file_digest(directory)
    digest = directory_digest(directory, (*HUB_FILES, *PICKLES))
    delta = read_delta(directory)
    if delta is None:
        return digest
    of_base = model_digest(str(_base_directory(directory, delta, base)))
    return hashlib.sha256(f"{digest} {of_base}".encode()).hexdigest()


def name_beside(name: str, directory: Path) -> str:
    """A model's name for a file in ``directory`` that others get, too: no absolute path.

    Embedded names and hub ids stay. A snapshot in the hub's cache gets its id back. Another path
    becomes one that starts at the directory, and begins with a dot.
    """
    if name in (*EMBEDDED, TUNED, *PACKAGES) or not os.path.exists(name):
        return name
    path = os.path.realpath(name)
    snapshot = HUB_SNAPSHOT.search(path)
    if snapshot:
        return f"{snapshot[1]}/{snapshot[2]}"
    relative = os.path.relpath(path, os.path.realpath(directory))
    return relative if relative.startswith(".") else os.path.join(".", relative)


def _eos_ids(
    generation: GenerationDefaults, config: ModelConfig, tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """End-of-sequence ids of the generation config, which often lists more than config.json.

    If neither names any, it is the ``eos_token`` of the tokenizer's config.
    """
    ids = generation.eos_ids or config.eos_ids
    if not ids and tokenizer is not None and tokenizer.eos_id is not None:
        ids = (tokenizer.eos_id,)
    return ids


def _num_params(params: dict) -> int:
    """The number of parameters; a quantized weight counts its codes, not its scales."""
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    return sum(math.prod(leaf.shape) for leaf in leaves)


def _count_text(count: int) -> str:
    """A count in three digits or so: ``950``, ``12.3K``, ``8.7M``, ``70.6B``."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)
