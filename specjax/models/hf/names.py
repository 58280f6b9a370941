"""Where a checkpoint keeps each parameter: tensor names and layouts.

Our params are alike in every family: q, k and v apart, weights ``[out, in]``. Checkpoints may
hold q, k and v in one tensor, or weights ``[in, out]``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

Path = tuple[str, ...]
QKV = ("q", "k", "v")


class Stored(NamedTuple):
    """One parameter's place: the tensor, and how it lies in there.

    ``part``: it is number ``part`` of q, k and v in a fused tensor, whose rows are
    ``[groups, 3, rows / groups]``: one group where the three are stacked, one per head where
    they are interleaved.
    """

    name: str
    transposed: bool = False
    part: int | None = None
    groups: int = 1

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape, from the parameter's."""
        rows = ours[0] * (1 if self.part is None else len(QKV))
        shape = (rows, *ours[1:])
        return shape[::-1] if self.transposed else shape

    def take(self, tensor: Any) -> Any:
        """The parameter out of the whole tensor."""
        tensor = tensor.T if self.transposed else tensor
        if self.part is None:
            return tensor
        rows, rest = tensor.shape[0] // len(QKV), tensor.shape[1:]
        parts = tensor.reshape(self.groups, len(QKV), rows // self.groups, *rest)
        return parts[:, self.part].reshape(rows, *rest)

    def put(self, tensor: Any, value: Any) -> None:
        """Writes the parameter into the whole numpy tensor."""
        tensor = tensor.T if self.transposed else tensor
        if self.part is None:
            tensor[...] = value
            return
        rows, rest = value.shape[0], value.shape[1:]
        parts = tensor.reshape(self.groups, len(QKV), rows // self.groups, *rest)
        parts[:, self.part] = value.reshape(self.groups, rows // self.groups, *rest)


@dataclasses.dataclass(frozen=True)
class Names:
    """A family's tensor names.

    ``base`` is the prefix that checkpoints of the bare model, without a head, leave out.
    ``ignored`` are name endings of buffers that old checkpoints carry.
    """

    layer: str
    modules: Mapping[str, str]  # ours to theirs: inside a layer, and outside
    base: str = "model."
    head: str = "lm_head.weight"
    fused_qkv: str | None = None  # the module that holds q, k and v together
    interleaved: bool = False
    transposed: bool = False
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)  # old to new name

    def stored(self, path: Path, heads: int) -> Stored:
        """Where the parameter at ``path`` of our nested dict lies."""
        if path == ("head",):
            return Stored(self.head)
        if path[0] != "layers":
            bare = len(path) == 1  # a table, and no module of weight and bias
            return Stored(f"{self.modules[path[0]]}.{'weight' if bare else path[-1]}")
        module, kind = path[2:-1], path[-1]
        layer = f"{self.layer}.{path[1]}"
        turned = self.transposed and kind == "weight" and not module[-1].endswith("norm")
        if self.fused_qkv and module[-1] in QKV:
            groups = heads if self.interleaved else 1
            name = f"{layer}.{self.fused_qkv}.{kind}"
            return Stored(name, turned, QKV.index(module[-1]), groups)
        return Stored(f"{layer}.{self.modules['.'.join(module)]}.{kind}", turned)

    def full(self, name: str) -> str:
        """The present name of a tensor as an old or a bare checkpoint calls it."""
        name = self.renamed.get(name, name)
        return name if name == self.head or name.startswith(self.base) else self.base + name
