"""Where a checkpoint keeps each parameter: tensor names and layouts.

In our params every family looks the same: q, k and v are separate, and weights are ``[out, in]``.
A checkpoint may have q, k and v in one tensor, or weights ``[in, out]``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from specjax.models.config import ModelConfig

# The keys of a parameter in our nested dict: ("layers", "0", "attention", "q", "weight").
Path = tuple[str, ...]
QKV = ("q", "k", "v")
GATE_UP = ("gate", "up")

# What wrappers write into the names of the modules inside them, wherever they stand.
_MARKS = re.compile("_orig_mod[.]|_fsdp_wrapped_module[.]|_checkpoint_wrapped_module[.]")
# Prefixes of wrappers and of larger models: they mean that only where every name has them.
_PREFIXES = ("module.", "base_model.model.", "language_model.")
_MODEL = "model."  # a wrapper's as well, though in most families it is the model's own
_INNER = "model.language_model."  # the text part of a larger model, whose head stands outside


class Stored(NamedTuple):
    """The tensor that stores one parameter, and how it does.

    ``transposed``: the tensor is ``[in, out]``. ``sizes``: the tensor holds several parameters, and
    this is number ``part`` of them. Its rows are then ``[groups, sum(sizes)]``: one group where
    the parameters are stacked, one group per key head where their heads are interleaved.
    ``stacked``: all this holds for each entry of the first axis, of experts. ``in_row``: the
    tensor has one more axis, of size 1, in front. ``count``: the parameter is an array of the
    tensors ``name.format(0)`` to ``name.format(count - 1)``.
    """

    name: str
    transposed: bool = False
    part: int = 0
    groups: int = 1
    sizes: tuple[int, ...] = ()
    stacked: bool = False
    count: int = 0
    in_row: bool = False

    @property
    def names(self) -> list[str]:
        """The tensors that store the parameter."""
        if not self.count:
            return [self.name]
        return [self.name.format(i) for i in range(self.count)]

    def shape(self, param_shape: tuple[int, ...]) -> tuple[int, ...]:
        """A tensor's shape, from the parameter's."""
        if self.count:
            param_shape = param_shape[1:]
        if self.in_row:
            return (1, *param_shape)
        first = param_shape[: self.stacked]
        rows, *rest = param_shape[self.stacked :]
        if self.sizes:
            rows = self.groups * sum(self.sizes)
        single = (rows, *rest)
        return (*first, *(single[::-1] if self.transposed else single))

    def take(self, tensor: Any) -> Any:
        """The parameter, taken out of the whole tensor."""
        if self.in_row:
            return tensor[0]
        if self.transposed:
            tensor = tensor.swapaxes(-1, -2)
        if not self.sizes:
            return tensor
        first = tensor.shape[: self.stacked]
        rest = tensor.shape[self.stacked + 1 :]
        return self._rows(tensor).reshape(*first, -1, *rest)

    def put(self, tensor: Any, value: Any) -> None:
        """Writes the parameter into the whole numpy tensor, in place."""
        if self.transposed:
            tensor = tensor.swapaxes(-1, -2)
        if not self.sizes:
            tensor[...] = value
            return
        rows = self._rows(tensor)
        rows[...] = value.reshape(rows.shape)

    def _rows(self, tensor: Any) -> Any:
        """The parameter's rows of each group; of a numpy tensor a view."""
        axis = int(self.stacked)
        shape = (*tensor.shape[:axis], self.groups, sum(self.sizes), *tensor.shape[axis + 1 :])
        first = sum(self.sizes[: self.part])
        rows = slice(first, first + self.sizes[self.part])
        grouped = tensor.reshape(shape)
        return grouped[:, :, rows] if self.stacked else grouped[:, rows]


class StackedExperts(NamedTuple):
    """Weights of all experts in one tensor: ``[E, in, out]`` if ``transposed``.

    ``interleaved``: rows of gate and up alternate; otherwise up follows gate.
    """

    transposed: bool = False
    interleaved: bool = False


@dataclasses.dataclass(frozen=True)
class Names:
    """A family's tensor names.

    Attributes:
      layer: prefix of the layers; a layer's number follows.
      modules: the checkpoint's name of each module of ours, inside a layer and outside.
      base: the prefix that checkpoints of the bare model, without a head, leave out.
      head: the name of the head's weight.
      fused_qkv: the module that holds q, k and v in one tensor, if there is one.
      interleaved: in that module each key head follows its queries, and its values follow it;
        otherwise q, k and v are stacked.
      fused_gate_up: the module that holds gate and up in one tensor, if there is one.
      stacked_experts: how a tensor holds all experts' gate and up, and another their down; None:
        each expert has tensors of its own.
      transposed: weights are stored ``[in, out]``.
      ignored: endings of names of buffers that old checkpoints carry.
      renamed: the present name of each tensor that old checkpoints name otherwise.
    """

    layer: str
    modules: dict[str, str]
    base: str = "model."
    head: str = "lm_head.weight"
    fused_qkv: str | None = None
    interleaved: bool = False
    fused_gate_up: str | None = None
    stacked_experts: StackedExperts | None = None
    transposed: bool = False
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def stored(self, path: Path, cfg: ModelConfig) -> Stored:
        """Where the parameter at ``path`` of our nested dict is stored."""
        if path == ("head",):
            return Stored(self.head)
        if path == ("head_bias",):
            return Stored(self.head.replace("weight", "bias"))
        if path[0] != "layers":
            # A table is a parameter by itself; a module has a weight and perhaps a bias.
            kind = "weight" if len(path) == 1 else path[-1]
            return Stored(f"{self.modules[path[0]]}.{kind}")

        _, number, *module, kind = path
        layer = f"{self.layer}.{number}"
        is_norm = module[-1].endswith("norm")
        transposed = self.transposed and kind == "weight" and not is_norm
        if self.fused_qkv and module[-1] in QKV:
            name = f"{layer}.{self.fused_qkv}.{kind}"
            groups = cfg.num_kv_heads if self.interleaved else 1
            keys = cfg.num_kv_heads * cfg.head_dim // groups
            queries = cfg.num_heads * cfg.head_dim // groups
            sizes = (queries, keys, keys)
            return Stored(name, transposed, QKV.index(module[-1]), groups, sizes)
        if self.fused_gate_up and module[-1] in GATE_UP:
            name = f"{layer}.{self.fused_gate_up}.{kind}"
            sizes = (cfg.intermediate_size,) * 2
            return Stored(name, transposed, GATE_UP.index(module[-1]), 1, sizes)
        name = f"{layer}.{self._inner_name(module, kind)}"
        if "experts" in module and self.stacked_experts is not None:
            return self._stacked(name, module[-1], kind, cfg)
        if "{}" not in name:
            return Stored(name, transposed)
        if "experts" in module:
            assert cfg.experts is not None, "only a mixture has experts"
            return Stored(name, transposed, count=cfg.experts.count)
        heads = cfg.num_heads if module[-1] == "q_norm" else cfg.num_kv_heads
        return Stored(name, transposed, count=heads)

    def _inner_name(self, module: Sequence[str], kind: str) -> str:
        """The name inside of its layer; ``modules`` may have one for a single parameter."""
        key = ".".join(module)
        single = self.modules.get(f"{key}.{kind}")
        return single if single is not None else f"{self.modules[key]}.{kind}"

    def _stacked(self, name: str, part: str, kind: str, cfg: ModelConfig) -> Stored:
        """Where all experts' gate, up or down is stored in one tensor."""
        assert cfg.experts is not None and self.stacked_experts is not None, "a mixture has both"
        transposed = self.stacked_experts.transposed and kind == "weight"
        if part not in GATE_UP:
            return Stored(name, transposed, stacked=True)
        groups, rows = 1, cfg.experts.size
        if self.stacked_experts.interleaved:
            groups, rows = rows, groups
        return Stored(name, transposed, GATE_UP.index(part), groups, (rows, rows), True)

    def unwrapped(self, stored: Iterable[str]) -> dict[str, str]:
        """The stored name of each tensor, by its name without what wrappers added.

        Wrappers are DataParallel, torch.compile, FSDP, PEFT, Lightning, or a larger model. A name
        whose unwrapped form another one has already keeps its own.
        """
        plain = {name: _MARKS.sub("", name) for name in stored}
        while True:
            start, replacement = self._wrapper(plain.values())
            if not start:
                break
            for name, text in plain.items():
                if text.startswith(start):
                    plain[name] = replacement + text.removeprefix(start)
        by_plain: dict[str, str] = {}
        for name, text in plain.items():
            by_plain[name if text in by_plain else text] = name
        return by_plain

    def _wrapper(self, names: Collection[str]) -> tuple[str, str]:
        """The prefix of a wrapper that all these names have, and what replaces it; maybe empty."""
        if not names:
            return "", ""
        for prefix in _PREFIXES:
            if all(name.startswith(prefix) for name in names):
                return prefix, ""
        others = [name for name in names if not self._is_head(name)]
        if others and all(name.startswith(_INNER) for name in others):
            return _INNER, _MODEL
        wrapped = (f"{_MODEL}{self.base}", f"{_MODEL}{self.head.removesuffix('weight')}")
        if self.base and all(name.startswith(wrapped) for name in names):
            return _MODEL, ""
        return "", ""

    def _is_head(self, name: str) -> bool:
        """Whether it is the output layer's weight, or its bias."""
        return name.startswith(self.head.removesuffix("weight"))

    def full(self, name: str) -> str:
        """The present name of a tensor, from the name in an old or a bare checkpoint."""
        name = self.renamed.get(name, name)
        if self._is_head(name) or name.startswith(self.base):
            return name
        return self.base + name
