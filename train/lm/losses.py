"""The losses of ``train.lm``: cross-entropy on text, and a draft's distance to its teacher.

Axes: B rows, T tokens, D hidden size.
"""

from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float
from tokenizers import Tokenizer

from specjax import text
from specjax._util.errors import InputError
from specjax._util.waiting import waiting
from specjax.lm import locate
from specjax.models import ModelConfig, hidden_states, load_pretrained
from specjax.models.blocks import Remat
from specjax.models.hf.read import load_config
from train.config import LMConfig
from train.data.packing import IGNORE
from train.data.tokenizer import id_count, load_tokenizer, tokenizer_file
from train.engine.loop import LossFn
from train.engine.losses import (
    OutputHead,
    cast,
    chunked_distillation,
    label_count,
    row_arguments,
)


def training_loss(
    cfg: LMConfig, model: ModelConfig, tokenizer: Tokenizer, rows: NamedSharding | None = None
) -> tuple[LossFn, dict | None]:
    """(the loss that the config asks for, the teacher's params or None).

    Args:
      tokenizer: of the model that is trained.
      rows: the sharding of a batch's rows; None: on one device.

    Raises:
      InputError, ModelError: the teacher cannot be read, or has another vocabulary or too short a
        context.
    """
    dtype = cfg.model.compute_dtype
    remat = cfg.model.remat
    if not cfg.distill.teacher:
        return data_loss(model, dtype, remat, rows), None

    directory = locate(cfg.distill.teacher)
    _check_teacher(cfg, load_config(directory), directory, tokenizer)
    with waiting(f"loading {cfg.distill.teacher}"):
        teacher, teacher_params = load_pretrained(directory, jnp.dtype(dtype))
    loss = distillation_loss(
        model,
        teacher,
        cfg.distill.alpha,
        cfg.distill.temperature,
        dtype,
        remat,
        rows,
        ids=id_count(tokenizer),
    )
    return loss, teacher_params


def _check_teacher(
    cfg: LMConfig, teacher: ModelConfig, directory: Path, tokenizer: Tokenizer
) -> None:
    """Raises InputError if the teacher cannot read the rows of the draft."""
    named = f"distill.teacher={cfg.distill.teacher!r}"
    path = tokenizer_file(directory)
    if path.exists():
        ours = text.Tokenizer(tokenizer)
        difference = ours.difference(text.Tokenizer(load_tokenizer(path)))
        if difference:
            raise InputError(
                f"{named} has another tokenizer than the draft ({difference}): set tokenizer.path "
                f"to {path}"
            )
    # Rows beyond the tokenizer's ids are padding, in the teacher and in the draft.
    if teacher.vocab_size < id_count(tokenizer):
        raise InputError(
            f"{named} has {teacher.vocab_size} ids, the tokenizer {id_count(tokenizer)}: use the "
            "teacher's tokenizer for both"
        )
    if cfg.data.seq_len > teacher.max_position:
        raise InputError(
            f"{named} has a context of {teacher.max_position} tokens, shorter than "
            f"data.seq_len={cfg.data.seq_len}: lower it, or choose another teacher"
        )


def data_loss(
    cfg: ModelConfig,
    dtype: str = "float32",
    remat: Remat = False,
    rows: NamedSharding | None = None,
    byte_counts: np.ndarray | None = None,
) -> LossFn:
    """Cross-entropy of the next token in nats, summed, and the number of tokens.

    Args:
      dtype: of the forward pass.
      remat: recompute each block in the backward pass.
      rows: the sharding of a batch's rows; None: on one device.
      byte_counts: `[V]` UTF-8 bytes of each id. If given, the loss has a third value,
        ``bits_per_byte``: the bits and the bytes of the tokens that were predicted.
    """

    def loss(params, frozen, batch):
        head, hidden = outputs(cfg, cast(params, dtype), batch, remat, rows)
        labels = batch["labels"]
        nats, count = head.cross_entropy(hidden, labels)
        if byte_counts is None:
            return nats, count
        real = labels != IGNORE
        in_bytes = jnp.where(real, jnp.asarray(byte_counts)[jnp.where(real, labels, 0)], 0)
        bits = nats / math.log(2)
        return nats, count, {"bits_per_byte": (bits, in_bytes.sum().astype(bits.dtype))}

    return loss


def distillation_loss(
    cfg: ModelConfig,
    teacher: ModelConfig,
    alpha: float,
    temperature: float,
    dtype: str = "float32",
    remat: Remat = False,
    rows: NamedSharding | None = None,
    ids: int | None = None,
) -> LossFn:
    """``alpha · KL(teacher ‖ draft) + (1 − alpha) · cross-entropy``, summed, and the token count.

    Logged with it: ``loss``, the cross-entropy alone, as it is evaluated on held-out text. What is
    minimized is logged as ``objective``.

    ``frozen`` are the teacher's params. See :func:`train.engine.losses.chunked_distillation`; the
    other arguments are those of :func:`data_loss`.

    Args:
      ids: the ids of the tokenizer. Both models may have more rows: padding, to which the teacher
        gives no probability. None: all rows of both are ids.
    """

    def loss(params, frozen, batch):
        head, hidden = outputs(cfg, cast(params, dtype), batch, remat, rows)
        teacher_head, teacher_hidden = jax.lax.stop_gradient(
            outputs(teacher, frozen, batch, rows=rows, ids=slice(ids))
        )
        total, count, nats = chunked_distillation(
            head, hidden, teacher_head, teacher_hidden, batch["labels"], alpha, temperature
        )
        return total, count, {"loss": (nats, count)}

    return loss


def outputs(
    cfg: ModelConfig,
    params: dict,
    batch: dict,
    remat: Remat = False,
    rows: NamedSharding | None = None,
    ids: slice | None = None,
) -> tuple[OutputHead, Float[Array, "B T D"]]:
    """(the model's output layer, the hidden states of a batch).

    The output layer gives logits of ``ids``; None: of all.
    """
    head = OutputHead.of(cfg, params, rows, ids)
    labels = label_count(batch["labels"])
    states = hidden_states(
        cfg, params, *row_arguments(batch), remat=remat, rows=rows, labels=labels
    )
    return head, states.hidden
