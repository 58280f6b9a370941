"""The config of an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840).

A head is one decoder layer that drafts from its target's hidden states. Its vocabulary may be a
part of the target's. This file knows neither arrays on a device nor the layouts of checkpoints.

Axis legend: P layers of the target that the head reads, v draft vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from specjax._util.errors import ModelError
from specjax.models.config import ModelConfig, RopeConfig

FAMILY = "eagle3"
DEFAULT_PARTS = 3  # layers that a head reads where its config names none
ID_DTYPE = np.int32  # of draft_ids


@dataclasses.dataclass(frozen=True)
class HeadConfig(ModelConfig):
    """The head's own layer as a :class:`ModelConfig`, and what only a head has.

    ``vocab_size`` is the target's.

    Attributes:
      target_size: the target's hidden size.
      layer_ids: layers of the target whose inputs the head reads; (): 2, n // 2 and n − 3.
      draft_ids: the bytes of an int32 array ``[v]``, the target's id of each draft id, ascending.
        None: the draft vocabulary is the target's. Bytes, so that the config can be hashed.
      norm_before_residual: the residual stream starts after the norm of the features.
      norm_before_fc: one norm over the concatenated P states, before the product that joins them.
      fc_norm: a norm for each of the P states, before they are concatenated.
      norm_output: the next drafted step reads normed hidden states.
      own_embedding: False: the head reads its target's embedding.
      verifier: the model that the head was made for, if its checkpoint says so.
    """

    target_size: int = 0
    layer_ids: tuple[int, ...] = ()
    draft_ids: bytes | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = True
    verifier: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.norm_before_fc and self.fc_norm:
            raise ModelError("norm_before_fc and fc_norm exclude each other: set one of them")

    @classmethod
    def of(cls, target: ModelConfig, ids: np.ndarray | None = None, **other: Any) -> HeadConfig:
        """A head with the sizes of its target.

        Args:
          ids: int ``[v]``, the target's ids that the head drafts; None: all of them.
          other: further fields. ``layer_ids`` default to :func:`usual_layers`.
        Raises:
          ModelError: the target has too few layers for the default, or ``ids`` cannot be used.
        """
        names = ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim")
        names += ("intermediate_size", "max_position", "norm_eps", "eos_ids", "bos_id", "pad_id")
        fields: dict[str, Any] = {name: getattr(target, name) for name in names}
        fields["num_layers"] = 1
        fields["target_size"] = target.hidden_size
        fields["rope"] = target.rope or RopeConfig()
        if "layer_ids" not in other:
            fields["layer_ids"] = usual_layers(target)
        if ids is not None:
            fields["draft_ids"] = pack_ids(ids, target.vocab_size)
        return cls(FAMILY, **fields | other)

    @functools.cached_property
    def ids(self) -> np.ndarray | None:
        """int32 ``[v]``: the target's id of each draft id, ascending; None: they are the same."""
        if self.draft_ids is None:
            return None
        return np.frombuffer(self.draft_ids, ID_DTYPE)

    @property
    def draft_size(self) -> int:
        """v, the size of the draft vocabulary."""
        if self.draft_ids is None:
            return self.vocab_size
        return len(self.draft_ids) // np.dtype(ID_DTYPE).itemsize

    @property
    def parts(self) -> int:
        """P, the number of the target's layers that the head reads."""
        return len(self.layer_ids) or DEFAULT_PARTS


def usual_layers(target: ModelConfig) -> tuple[int, ...]:
    """The layers that EAGLE-3 reads: an early one, the middle one, a late one.

    Raises:
      ModelError: the target has too few layers.
    """
    count = target.num_layers
    layers = (2, count // 2, count - 3)
    if not all(0 <= layer < count for layer in layers):
        raise ModelError(
            f"a target of {count} layers has no layers 2, n // 2 and n - 3 for a head to read; "
            "name others (eagle_aux_hidden_state_layer_ids)"
        )
    return layers


def pack_ids(ids: np.ndarray, vocab: int) -> bytes | None:
    """``draft_ids`` from the target's ids that a head drafts, int ``[v]``; None: all of them.

    Raises:
      ModelError: the ids do not ascend, or one is outside the vocabulary.
    """
    ids = np.asarray(ids)
    if ids.min() < 0 or ids.max() >= vocab:
        outside = ids[np.argmax((ids < 0) | (ids >= vocab))]
        raise ModelError(f"d2t names id {outside}, and the target has ids 0 to {vocab - 1}")
    if (np.diff(ids) <= 0).any():
        raise ModelError("d2t does not name ascending ids of the target, each once")
    return None if len(ids) == vocab else ids.astype(ID_DTYPE).tobytes()
