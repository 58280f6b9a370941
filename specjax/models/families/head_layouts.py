"""The checkpoint layouts of EAGLE-3 heads: tensor names and ``config.json``.

Published heads come in two layouts, SafeAILab's (the paper's authors) and speculators', which vLLM
reads as well. They differ in names only. Both are read; heads are saved in the second one.

Axis legend: V the target's vocabulary, v draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from specjax._util.checks import FLAG, OBJECT, list_of, quoted, require_all, whole
from specjax._util.errors import ModelError
from specjax.models.config import ModelConfig
from specjax.models.families import llama, qwen
from specjax.models.families.head_config import FAMILY, HeadConfig, pack_ids
from specjax.models.hf import config as hf_config
from specjax.models.hf.kinds import names_eagle3
from specjax.models.hf.names import Names, Path, Stored

MIDLAYER = "midlayer."  # SafeAILab's name of the layer, which speculators calls layers.0
D2T = "d2t"  # draft id to target id, as offsets
T2D = "t2d"  # whether the head drafts a target id, as a mask
MOST_IDS = 1 << 22  # of a vocabulary
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
KEYS = dict.fromkeys(FLAGS, FLAG) | {
    "draft_vocab_size": whole(),
    "target_hidden_size": whole(),
    LAYER_IDS: list_of(whole(0)),
    "transformer_layer_config": OBJECT,
    "speculators_config": OBJECT,
    "eagle_config": OBJECT,
}
# The families that a head's layer may be of.
LAYER_FAMILIES: dict[str, ModuleType] = {
    "llama": llama,
    "mistral": llama,
    "qwen2": qwen,
    "qwen3": qwen,
}


class HeadNames(Names):
    """The tensor names of both layouts; the present names are speculators'."""

    def stored(self, path: Path, cfg: ModelConfig) -> Stored:
        if path[0] == "fc_norm":
            return Stored(".".join(path))
        return super().stored(path, cfg)

    def full(self, name: str) -> str:
        name = name.removeprefix("model.")
        if name.startswith(MIDLAYER):
            return f"layers.0.{name.removeprefix(MIDLAYER)}"
        return name


NAMES = HeadNames(
    layer="layers",
    modules=qwen.NAMES.modules
    | {
        "embed": "embed_tokens",
        "fc": "fc",
        "input_norm": "input_norm",
        "norm": "norm",
        "hidden_norm": "hidden_norm",
    },
    base="",
    ignored=("rotary_emb.inv_freq", D2T, T2D, "verifier_lm_head.weight", "verifier_norm.weight"),
)


def is_head(config: hf_config.Config) -> bool:
    """Whether a ``config.json`` is a head's.

    Only heads name speculators' model type or a class of EAGLE-3, or have a draft vocabulary.
    """
    by_key = "speculators_model_type" in config or "draft_vocab_size" in config
    return by_key or names_eagle3(config)


def from_hf(config: hf_config.Config) -> HeadConfig:
    """The :class:`HeadConfig` of a head's ``config.json``, in either layout.

    Only the tensors say which ids the head drafts, and whether it has an embedding: see
    :func:`complete`.

    Raises:
      ModelError: a value is wrong, or the head is of a kind that is not supported.
    """
    kind = config.get("speculators_model_type", FAMILY)
    if kind != FAMILY:
        raise ModelError(f"speculators_model_type {quoted(kind)} is not supported, {FAMILY} is")
    require_all("config.json: ", config, KEYS, ModelError)

    # speculators describes the layer in an object of its own, SafeAILab at the top level.
    layer = _layer_config(config.get("transformer_layer_config") or config)
    draft_size = hf_config.size(config, "draft_vocab_size", layer.vocab_size)
    if draft_size > MOST_IDS:
        raise ModelError(f"draft_vocab_size={draft_size}: expected at most {MOST_IDS}")
    if draft_size > layer.vocab_size:
        raise ModelError(
            f"draft_vocab_size={draft_size} is more than vocab_size={layer.vocab_size}"
        )
    fields = {field.name: getattr(layer, field.name) for field in dataclasses.fields(ModelConfig)}
    fields |= {"family": FAMILY, "tie_embeddings": False}
    fields |= {name: hf_config.flag(config, name, False) for name in FLAGS}
    layer_ids = config.get(LAYER_IDS) or (config.get("eagle_config") or {}).get(LAYER_IDS)
    return HeadConfig(
        **fields,
        target_size=hf_config.size(config, "target_hidden_size", layer.hidden_size),
        layer_ids=tuple(layer_ids or ()),
        # A placeholder with the right number of draft ids; the tensors name the ids themselves.
        draft_ids=pack_ids(np.arange(draft_size), layer.vocab_size),
        verifier=_verifier(config),
    )


def _layer_config(layer: hf_config.Config) -> ModelConfig:
    """The config of the head's one layer, read as its family reads it."""
    family = layer.get("model_type")
    if not isinstance(family, str) or family not in LAYER_FAMILIES:
        known = ", ".join(LAYER_FAMILIES)
        raise ModelError(f"a head's model_type {quoted(family)} is not supported; {known} are")
    hf_config.check(layer)
    cfg = LAYER_FAMILIES[family].from_hf(layer)
    if cfg.num_layers != 1 or cfg.sliding_window is not None:
        raise ModelError("a head of several layers, or of a sliding window, is not supported")
    return cfg


def _verifier(config: hf_config.Config) -> str | None:
    """The name of the model that the head was made for, where the config gives it."""
    verifier = (config.get("speculators_config") or {}).get("verifier")
    return verifier.get("name_or_path") if type(verifier) is dict else None


def complete(cfg: HeadConfig, tensors: Mapping[str, Callable[[], np.ndarray]]) -> HeadConfig:
    """The config, with what only a checkpoint's tensors say.

    ``tensors`` has, by the tensor's name, a function that reads it.

    Raises:
      ModelError: the draft vocabulary is missing, out of range, or contradicts itself.
    """
    own_embedding = "embed_tokens.weight" in tensors or "embed.codes" in tensors
    cfg = dataclasses.replace(cfg, own_embedding=own_embedding)
    if D2T not in tensors:
        if cfg.draft_ids is not None:
            raise ModelError(
                f"tensor {D2T} is missing: which {cfg.draft_size} of the target's "
                f"{cfg.vocab_size} ids does the head draft?"
            )
        return cfg

    offsets = tensors[D2T]()
    if offsets.shape != (cfg.draft_size,) or offsets.dtype.kind != "i":
        raise ModelError(
            f"tensor {D2T} has shape {list(offsets.shape)} of {offsets.dtype}, expected "
            f"{cfg.draft_size} whole numbers, as draft_vocab_size says"
        )
    # int64: in a narrower type an offset out of any range could wrap into it.
    ids = np.arange(cfg.draft_size) + offsets.astype(np.int64)
    cfg = dataclasses.replace(cfg, draft_ids=pack_ids(ids, cfg.vocab_size))
    # A head of all ids does not read t2d. SafeAILab's code leaves it as zeros in such heads.
    if T2D in tensors and cfg.draft_ids is not None:
        mask = tensors[T2D]()
        if mask.shape != (cfg.vocab_size,) or not np.array_equal(np.flatnonzero(mask), ids):
            raise ModelError(f"tensors {D2T} and {T2D} name different ids of the target")
    return cfg


def buffers(cfg: HeadConfig) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint that are no parameters: the draft vocabulary.

    ``d2t`` int64 ``[v]``: the target's id of each draft id, minus the draft id. ``t2d`` bool
    ``[V]``: whether each of the target's ids is drafted. Empty if the vocabularies are the same.
    """
    ids = cfg.ids
    if ids is None:
        return {}
    mask = np.zeros(cfg.vocab_size, bool)
    mask[ids] = True
    offsets = (ids - np.arange(cfg.draft_size)).astype(np.int64)
    return {D2T: offsets, T2D: mask}


def to_hf(cfg: HeadConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` of speculators' layout, which vLLM reads as well."""
    family = "qwen3" if cfg.qk_norm else "llama"
    layer = dataclasses.replace(cfg, family=family)
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5}
    return {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculator_model",
        "speculators_model_type": FAMILY,
        "draft_vocab_size": cfg.draft_size,
        "target_hidden_size": None if cfg.target_size == cfg.hidden_size else cfg.target_size,
        LAYER_IDS: list(cfg.layer_ids) or None,
        **{name: getattr(cfg, name) for name in FLAGS},
        "transformer_layer_config": LAYER_FAMILIES[family].to_hf(layer, dtype),
        "speculators_config": {
            "algorithm": FAMILY,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": cfg.verifier, "architectures": []},
        },
        "torch_dtype": dtype,
    }
