"""A head on a target's hidden states (EAGLE-3, Li et al. 2025, arXiv 2503.01840).

One decoder layer that reads, beside the next token's embedding, what some layers of its target
read at the token before: it drafts in the target's own terms. Its vocabulary may be a part of the
target's. Published heads come in two layouts, SafeAILab's and speculators', which differ in names
alone; heads are saved in the second.

Axis legend: B rows, N tokens, P auxiliary layers, D hidden size, T the target's, V vocabulary,
v draft vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from specjax._util.checks import FLAG, OBJECT, list_of, quoted, require_all, whole
from specjax._util.errors import ModelError
from specjax.models import sharding
from specjax.models.blocks import MLP, Attend, Attention, Decoder, make_table
from specjax.models.config import ModelConfig, RopeConfig
from specjax.models.families import llama, qwen
from specjax.models.hf import config as hf_config
from specjax.models.hf.names import Names, Stored
from specjax.models.layers import NORMS, Linear, linear

FAMILY = "eagle3"
PARTS = 3  # layers that a head reads where its config names none
IDS = np.int32  # of draft_ids


@dataclasses.dataclass(frozen=True)
class HeadConfig(ModelConfig):
    """A head's layer as a :class:`ModelConfig`, and what makes a head of it.

    ``vocab_size`` is the target's. ``norm_before_residual``: the residual stream begins behind the
    norm of the features. ``norm_before_fc``: one norm over all parts before they are joined,
    ``fc_norm``: one of each. ``norm_output``: what the next drafted step reads is normed.
    """

    target_size: int = 0  # the target's hidden size
    layer_ids: tuple[int, ...] = ()  # of the target; (): 2, n // 2 and n − 3
    draft_ids: bytes | None = None  # int32: the target's id of each draft id, ascending; None: all
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = True  # False: it reads the target's
    verifier: str | None = None  # the model that it was made for

    def __post_init__(self):
        super().__post_init__()
        if self.norm_before_fc and self.fc_norm:
            raise ModelError("norm_before_fc and fc_norm exclude each other: set one of them")

    @classmethod
    def of(cls, target: ModelConfig, ids: np.ndarray | None = None, **other: Any) -> HeadConfig:
        """A head as wide as its target, with its heads and MLP: ``ids`` are those it drafts.

        ``other`` are further fields; ``layer_ids`` default to the usual ones.
        """
        names = ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim")
        names += ("intermediate_size", "max_position", "norm_eps", "eos_ids", "bos_id", "pad_id")
        fields = {name: getattr(target, name) for name in names}
        fields |= {"num_layers": 1, "target_size": target.hidden_size}
        fields |= {"rope": target.rope or RopeConfig()}
        if "layer_ids" not in other:
            fields["layer_ids"] = usual_layers(target)
        if ids is not None:
            fields["draft_ids"] = pack_ids(ids, target.vocab_size)
        return cls(FAMILY, **fields | other)

    @functools.cached_property
    def ids(self) -> np.ndarray | None:
        """int32 ``[v]``: the target's id of each draft id, ascending; None: they are the same."""
        return None if self.draft_ids is None else np.frombuffer(self.draft_ids, IDS)

    @property
    def draft_size(self) -> int:
        """v, the width of the head's own logits."""
        return self.vocab_size if self.draft_ids is None else len(self.draft_ids) // IDS().itemsize

    @property
    def parts(self) -> int:
        """P, how many layers of the target it reads."""
        return len(self.layer_ids) or PARTS


def usual_layers(target: ModelConfig) -> tuple[int, ...]:
    """The layers that EAGLE-3 reads: an early one, the middle one, a late one.

    Raises:
      ModelError: the target has not that many.
    """
    count = target.num_layers
    chosen = (2, count // 2, count - 3)
    if not all(0 <= layer < count for layer in chosen):
        raise ModelError(
            f"a target of {count} layers has no layers 2, n // 2 and n - 3 for a head to read; "
            "name others (eagle_aux_hidden_state_layer_ids)"
        )
    return chosen


def pack_ids(ids: np.ndarray, vocab: int) -> bytes | None:
    """``draft_ids`` of the target's ids that a head drafts; None where they are all of them.

    Raises:
      ModelError: they are not ascending ids of the vocabulary.
    """
    ids = np.asarray(ids)
    if ids.min() < 0 or ids.max() >= vocab:
        worst = ids[np.argmax((ids < 0) | (ids >= vocab))]
        raise ModelError(f"d2t names id {worst}, and the target has ids 0 to {vocab - 1}")
    if (np.diff(ids) <= 0).any():
        raise ModelError("d2t does not name ascending ids of the target, each once")
    return None if len(ids) == vocab else ids.astype(IDS).tobytes()


class HeadBlock(nnx.Module):
    """A decoder layer whose attention reads a token's embedding and the features before it."""

    def __init__(self, cfg: HeadConfig, rngs: nnx.Rngs, fused: bool):
        self.cfg = cfg
        norm, d = NORMS[cfg.norm], cfg.hidden_size
        self.attention_norm = norm(d, cfg.norm_eps)
        self.hidden_norm = norm(d, cfg.norm_eps)
        self.attention = Attention(cfg, rngs, fused, input_size=2 * d)
        self.mlp_norm = norm(d, cfg.norm_eps)
        self.mlp = MLP(cfg, rngs, fused)

    def __call__(self, x: Float[Array, "B N D"], features: Float[Array, "B N D"], table, attend):
        normed = self.hidden_norm(features)
        both = jnp.concatenate([self.attention_norm(x), normed], axis=-1)
        residual = normed if self.cfg.norm_before_residual else features
        x = residual + self.attention(both, table, attend)
        return x + self.mlp(self.mlp_norm(x))


class EagleHead(Decoder):
    """Tokens and features to hidden states ``[B, N, D]``, not normed; and what leads in and out."""

    def __init__(self, cfg: HeadConfig, rngs: nnx.Rngs, fused: bool = False):
        self.cfg = cfg
        norm, d, wide = NORMS[cfg.norm], cfg.hidden_size, cfg.parts * cfg.target_size
        if cfg.own_embedding:
            self.embed = make_table((cfg.vocab_size, d), ("vocab", "embedding"), rngs)
        self.fc = Linear((d, wide), ("hidden", "hidden"), False, cfg.shards, rngs)
        if cfg.norm_before_fc:
            self.input_norm = norm(wide, cfg.norm_eps)
        if cfg.fc_norm:
            each = {str(i): norm(cfg.target_size, cfg.norm_eps) for i in range(cfg.parts)}
            self.fc_norm = nnx.Dict(each)
        self.layers = nnx.Dict({"0": HeadBlock(cfg, rngs, fused)})
        self.norm = norm(d, cfg.norm_eps)
        self.head = make_table((cfg.draft_size, d), ("vocab", "embedding"), rngs)

    def __call__(
        self,
        tokens: Int[Array, "B N"],
        positions: Int[Array, "B N"],
        attend: Attend,
        remat: bool = False,
        scan: bool = False,
        aux_layers: tuple[int, ...] = (),
        features: Float[Array, "B N D"] | None = None,
        rows: NamedSharding | None = None,
    ) -> tuple[Float[Array, "B N D"], None]:
        x = self.embedded(tokens).astype(features.dtype)  # the target's, maybe
        table = self.tables(positions)[0]
        attend = functools.partial(attend, 0)

        def run(block: HeadBlock, x, features):
            x, features = (sharding.constrain(part, rows) for part in (x, features))
            return sharding.constrain(block(x, features, table, attend), rows)

        return (nnx.remat(run) if remat else run)(self.layers["0"], x, features), None

    def fused_states(self, states: Float[Array, "B N P T"]) -> Float[Array, "B N D"]:
        """The features that it reads, of what P layers of its target read."""
        if self.cfg.fc_norm:
            parts = [self.fc_norm[str(i)](states[:, :, i]) for i in range(self.cfg.parts)]
            states = jnp.stack(parts, axis=2)
        joined = states.reshape(*states.shape[:2], -1).astype(self.fc.weight.dtype)
        if self.cfg.norm_before_fc:
            joined = self.input_norm(joined)
        return self.fc(joined)

    def fed_back(self, hidden: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """What a drafted step reads in place of features, of the hidden states before it."""
        return self.norm(hidden) if self.cfg.norm_output else hidden

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... v"]:
        """Logits over the draft vocabulary, in the model's dtype."""
        logits = linear(self.norm(hidden), self.head[...])
        return sharding.gather_logits(logits, self.cfg.draft_size)


class HeadNames(Names):
    """Both layouts: speculators' ``layers.0``, which SafeAILab calls ``midlayer``."""

    def stored(self, path, heads):
        return Stored(".".join(path)) if path[0] == "fc_norm" else super().stored(path, heads)

    def full(self, name: str) -> str:
        name = name.removeprefix("model.")
        return f"layers.0.{name.removeprefix(MIDLAYER)}" if name.startswith(MIDLAYER) else name


MIDLAYER = "midlayer."
D2T, T2D = "d2t", "t2d"
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
LAYERS = {"llama": llama, "mistral": llama, "qwen2": qwen, "qwen3": qwen}


def is_head(config: hf_config.Config) -> bool:
    """Whether a ``config.json`` is a head's: it names speculators' type, or has a draft vocabulary.

    A head alone has either.
    """
    return "speculators_model_type" in config or "draft_vocab_size" in config


def from_hf(config: hf_config.Config) -> HeadConfig:
    """The :class:`HeadConfig` of a head's ``config.json``, in either layout.

    Which ids it drafts, and whether it has an embedding, its tensors say (:func:`complete`).
    """
    kind = config.get("speculators_model_type", FAMILY)
    if kind != FAMILY:
        raise ModelError(f"speculators_model_type {quoted(kind)} is not supported, {FAMILY} is")
    require_all("config.json: ", config, KEYS, ModelError)
    layer = config.get("transformer_layer_config") or config
    family = layer.get("model_type")
    if family not in LAYERS:
        known = ", ".join(LAYERS)
        raise ModelError(f"a head's model_type {quoted(family)} is not supported; {known} are")
    hf_config.check(layer)
    base = LAYERS[family].from_hf(layer)
    if base.num_layers != 1 or base.sliding_window is not None:
        raise ModelError("a head of several layers, or of a sliding window, is not supported")
    fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(ModelConfig)}
    draft = hf_config.size(config, "draft_vocab_size", base.vocab_size)
    if draft > base.vocab_size:
        raise ModelError(f"draft_vocab_size={draft} is more than vocab_size={base.vocab_size}")
    named = config.get(LAYER_IDS) or (config.get("eagle_config") or {}).get(LAYER_IDS)
    verifier = (config.get("speculators_config") or {}).get("verifier")
    return HeadConfig(
        **fields | {"family": FAMILY, "tie_embeddings": False},
        target_size=hf_config.size(config, "target_hidden_size", base.hidden_size),
        layer_ids=tuple(named or ()),
        draft_ids=pack_ids(np.arange(draft), base.vocab_size),  # so many; which, the tensors say
        **{name: hf_config.flag(config, name, False) for name in FLAGS},
        verifier=verifier.get("name_or_path") if type(verifier) is dict else None,
    )


def complete(cfg: HeadConfig, tensors: Mapping[str, Callable[[], np.ndarray]]) -> HeadConfig:
    """The config, with what a checkpoint's tensors alone say; they are read by name.

    Raises:
      ModelError: the draft vocabulary is missing, out of range, or contradicts itself.
    """
    own = not tensors.keys().isdisjoint(("embed_tokens.weight", "embed.codes"))
    cfg = dataclasses.replace(cfg, own_embedding=own)
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
    # Wide: an offset out of any range must not wrap into it.
    ids = np.arange(cfg.draft_size) + offsets.astype(np.int64)
    cfg = dataclasses.replace(cfg, draft_ids=pack_ids(ids, cfg.vocab_size))
    if T2D in tensors:
        drafted = tensors[T2D]()
        if drafted.shape != (cfg.vocab_size,) or not np.array_equal(np.flatnonzero(drafted), ids):
            raise ModelError(f"tensors {D2T} and {T2D} name different ids of the target")
    return cfg


def buffers(cfg: HeadConfig) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint that are no parameters: the draft vocabulary."""
    if cfg.ids is None:
        return {}
    drafted = np.zeros(cfg.vocab_size, bool)
    drafted[cfg.ids] = True
    return {D2T: (cfg.ids - np.arange(cfg.draft_size)).astype(np.int64), T2D: drafted}


def to_hf(cfg: HeadConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` of speculators' layout, which vLLM reads, too."""
    kind = "qwen3" if cfg.qk_norm else "llama"
    layer = dataclasses.replace(cfg, family=kind)
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5}
    return {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculator_model",
        "speculators_model_type": FAMILY,
        "draft_vocab_size": cfg.draft_size,
        "target_hidden_size": None if cfg.target_size == cfg.hidden_size else cfg.target_size,
        LAYER_IDS: list(cfg.layer_ids) or None,
        **{name: getattr(cfg, name) for name in FLAGS},
        "transformer_layer_config": LAYERS[kind].to_hf(layer, dtype),
        "speculators_config": {
            "algorithm": FAMILY,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": cfg.verifier, "architectures": []},
        },
        "torch_dtype": dtype,
    }
