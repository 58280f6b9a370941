"""The first weights of a head: those of an earlier or a published head, or random ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax._util.errors import InputError, PairError
from specjax.lm import fit_head, locate
from specjax.models import ModelConfig, head_matrix, init_params, load_pretrained
from specjax.models.families.head_config import HeadConfig
from specjax.models.hf.files import tensor_files
from specjax.models.hf.read import complete_config, same_embedding
from train.config import HeadRunConfig, HeadSection


def read_start(
    cfg: HeadRunConfig, target: ModelConfig, target_directory: Path
) -> tuple[Path, HeadConfig]:
    """(the directory of ``head.init_from``, the architecture of the head that starts from it).

    An embedding of the head's own that equals the target's is left out: it is shared.

    Raises:
      InputError, ModelError: it is no head, is for another target, or differs from the config.
    """
    name = cfg.head.init_from
    directory = locate(name)
    head = complete_config(directory)
    if not isinstance(head, HeadConfig):
        raise InputError(f"head.init_from={name!r} is a model, expected an EAGLE-3 head")
    tensor_files(directory, pickles=False)  # the ids that it drafts are there: no config has them
    try:
        head = fit_head(
            head, f"head.init_from={name!r}", target, f"model.init_from={cfg.model.init_from!r}"
        )
    except PairError as error:
        raise InputError(error) from None
    _check_same(cfg.head, head)
    longest = cfg.data.seq_len + cfg.head.steps
    if longest > head.max_position:
        raise InputError(
            f"data.seq_len={cfg.data.seq_len} and {cfg.head.steps} draft steps are longer than "
            f"the context of head.init_from={name!r} ({head.max_position}): lower data.seq_len"
        )
    if head.own_embedding and same_embedding(directory, target_directory):
        head = dataclasses.replace(head, own_embedding=False)
    return directory, dataclasses.replace(head, verifier=cfg.model.init_from)


def _check_same(section: HeadSection, head: HeadConfig) -> None:
    """Raises InputError if a key that is set says other than the head that is started from."""
    stored = {
        "draft_vocab": head.draft_size,
        "layers": head.layer_ids,
        "num_kv_heads": head.num_kv_heads,
        "intermediate_size": head.intermediate_size,
        "norm_before_residual": head.norm_before_residual,
    }
    for key, has in stored.items():
        asked = getattr(section, key)
        if not asked or asked == has:
            continue
        if isinstance(asked, tuple):
            asked = list(asked)
            has = list(has)
        raise InputError(
            f"head.{key}={asked}, but head.init_from={section.init_from!r} has {has}: leave "
            f"head.{key} out, or start without head.init_from"
        )


def first_params(
    head: HeadConfig, start: Path | None, target: ModelConfig, target_params: dict, seed: int
) -> dict:
    """The head's first float32 params.

    Without ``start`` they are random, but the output layer is the target's. The final norm is the
    target's, too, if both have the same kind of norm. The output layer is scaled so that the first
    logits have a standard deviation of 1 at most. Those of a target have several. With them a head
    whose states are still random would start sure of random tokens.

    Args:
      start: the directory of the head to start from, as :func:`read_start` gives it.

    Raises:
      ModelError: its weights cannot be read.
    """
    if start is not None:
        _, params = load_pretrained(start)
        if not head.own_embedding:
            params.pop("embed", None)
        return params
    params = init_params(head, jax.random.key(seed))
    table = head_matrix(target, target_params)
    if head.ids is not None:
        table = table[head.ids]
    table = table.astype(jnp.float32)
    if target.norm == head.norm:
        params["norm"] = jax.tree.map(lambda x: x.astype(jnp.float32), target_params["norm"])
    # A normed random state has independent entries of variance 1.
    variance = jnp.mean(jnp.sum((table * params["norm"]["weight"]) ** 2, axis=-1))
    params["head"] = table / jnp.maximum(1.0, jnp.sqrt(variance))
    return params
