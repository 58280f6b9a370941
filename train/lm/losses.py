"""What ``train.lm`` minimises: cross-entropy on text, or a draft's distance to its teacher."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from specjax._util.errors import InputError
from specjax.models import ModelConfig, load_pretrained
from specjax.models.blocks import Remat
from train.config import LMConfig
from train.engine.loop import LossFn
from train.engine.losses import OutputHead, cast, chunked_distillation, hidden_of


def training_loss(
    cfg: LMConfig, model: ModelConfig, rows: NamedSharding | None = None
) -> tuple[LossFn, dict | None]:
    """(the loss that the config asks for, the params of its teacher).

    ``rows``: where those of a batch lie, on several devices.
    """
    how = {"dtype": cfg.model.compute_dtype, "remat": cfg.model.remat, "rows": rows}
    if not cfg.distill.teacher:
        return data_loss(model, **how), None
    teacher, params = load_pretrained(cfg.distill.teacher, jnp.dtype(cfg.model.compute_dtype))
    if teacher.vocab_size != model.vocab_size:
        raise InputError(
            f"distill.teacher={cfg.distill.teacher!r} has {teacher.vocab_size} "
            f"ids, the draft {model.vocab_size}: share the tokenizer"
        )
    alpha, temperature = cfg.distill.alpha, cfg.distill.temperature
    return distillation_loss(model, teacher, alpha, temperature, **how), params


def data_loss(
    cfg: ModelConfig,
    dtype: str = "float32",
    remat: Remat = False,
    rows: NamedSharding | None = None,
) -> LossFn:
    """Cross-entropy of the next token, summed, and the number of tokens.

    ``dtype``: the forward pass's; ``rows``: where those of a batch lie, on several devices.
    """

    def loss(params, frozen, batch):
        head, hidden = outputs(cfg, cast(params, dtype), batch, remat=remat, rows=rows)
        return head.cross_entropy(hidden, batch["labels"])

    return loss


def distillation_loss(
    cfg: ModelConfig,
    teacher: ModelConfig,
    alpha: float,
    temperature: float,
    dtype: str = "float32",
    remat: Remat = False,
    rows: NamedSharding | None = None,
) -> LossFn:
    """The draft's loss; ``frozen`` are the teacher's params. The rest as :func:`data_loss`."""

    def loss(params, frozen, batch):
        own = outputs(cfg, cast(params, dtype), batch, remat=remat, rows=rows)
        others = jax.lax.stop_gradient(outputs(teacher, frozen, batch, rows=rows))
        return chunked_distillation(*own, *others, batch["labels"], alpha, temperature)

    return loss


def outputs(
    cfg: ModelConfig, params: dict, batch: dict, rows: NamedSharding | None = None, **how: Any
) -> tuple[OutputHead, Float[Array, "B T D"]]:
    """(the model's head, the hidden states of a batch's rows); ``how`` as :func:`hidden_of`."""
    return OutputHead.of(cfg, params, rows), hidden_of(cfg, params, batch, rows=rows, **how)
