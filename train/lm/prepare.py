"""Prepare a run of ``train.lm`` before any weight is read: tokenizer, architecture, corpus."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
from tokenizers import Tokenizer

from specjax._util import processes
from specjax._util.errors import InputError
from specjax._util.waiting import waiting
from specjax.lm import locate
from specjax.models import ModelConfig, init_params, load_pretrained
from specjax.models.hf.read import complete_config, load_config
from train.config import LMConfig, Model
from train.data.chats import ChatFormat, chat_format
from train.data.document_ends import DocumentEnds, checkpoint_ends, tokenizer_ends
from train.data.encoding import Layout, Plain
from train.data.reading import Document
from train.data.tokenized import Corpus
from train.data.tokenizer import id_count, load_tokenizer, tokenizer_file, train_tokenizer
from train.engine.batches import open_corpus, read_documents
from train.engine.shares import require_model_axis
from train.engine.starting import require_model, with_router_loss


class LmSetup(NamedTuple):
    """What a run needs: everything but its weights, and a function that makes the first weights."""

    tokenizer: Tokenizer
    model: ModelConfig
    first_params: Callable[[], dict]
    data: Corpus


def prepare_setup(
    cfg: LMConfig, directory: Path, cache: Path | None, resume: bool = False
) -> LmSetup:
    """Reads the tokenizer or trains it in the run's ``directory``, and reads the corpus.

    Args:
      cache: as for :func:`open_corpus`.
      resume: whether the directory's own tokenizer is the run's.
    """
    # With shards the text is never in memory.
    chats = chats_of(cfg)
    documents = None if cfg.data.shards else read_documents(cfg.data, chats)
    tokenizer = get_tokenizer(cfg, documents.texts if documents else None, directory, resume)
    model, first_params = build_model(cfg, tokenizer)
    model = with_router_loss(model, cfg.model.router_aux_loss)
    if cfg.mesh.model > 1:
        for each in (model, *teachers(cfg)):
            require_model_axis(each, cfg.mesh.model)
    ends = layout(cfg, model, tokenizer)
    data = open_corpus(cfg.data, tokenizer, ends, cache, documents, chats)
    return LmSetup(tokenizer, model, first_params, data)


def teachers(cfg: LMConfig) -> list[ModelConfig]:
    """The config of the model that a run distills; empty if it distills none."""
    if not cfg.distill.teacher:
        return []
    return [load_config(locate(cfg.distill.teacher))]


def chats_of(cfg: LMConfig) -> ChatFormat | None:
    """How a conversation becomes tokens; None for a tokenizer that is still to be trained."""
    file = _tokenizer_file(cfg)
    return None if file is None else chat_format(cfg.data, load_tokenizer(file), file.parent)


def _tokenizer_file(cfg: LMConfig) -> Path | None:
    """The configured tokenizer, else the checkpoint's; None: it is trained for the run."""
    if cfg.tokenizer.path:
        return Path(cfg.tokenizer.path)
    if cfg.model.init_from:
        return tokenizer_file(locate(cfg.model.init_from))
    return None


def layout(cfg: LMConfig, model: ModelConfig | None, tokenizer: Tokenizer) -> Layout:
    """How a document becomes tokens: between the checkpoint's or the tokenizer's BOS and EOS.

    Args:
      model: the checkpoint's config; not read for a new model.
    """
    start = cfg.model.init_from
    if start:
        return Plain(*checkpoint_ends(start, model, tokenizer))
    return Plain(*new_model_ends(cfg, tokenizer))


def new_model_ends(cfg: LMConfig, tokenizer: Tokenizer) -> DocumentEnds:
    """EOS and BOS of a model that is trained from random weights."""
    return tokenizer_ends(tokenizer, cfg.tokenizer.path, cfg.tokenizer.eos)


def build_model(cfg: LMConfig, tokenizer: Tokenizer) -> tuple[ModelConfig, Callable[[], dict]]:
    """The architecture, and a function that makes its first params.

    Raises:
      InputError: the tokenizer has more ids than the model, or rows are longer than its context.
    """
    vocab_size = id_count(tokenizer)
    if cfg.model.init_from:
        model = complete_config(locate(cfg.model.init_from))
        require_model(model, cfg.model.init_from)
    else:
        model = _new_model(cfg.model, vocab_size, new_model_ends(cfg, tokenizer))
    if model.vocab_size < vocab_size:
        raise InputError(
            f"model.init_from={cfg.model.init_from!r} has {model.vocab_size} ids, the "
            f"tokenizer {vocab_size}: set tokenizer.path to the checkpoint's own"
        )
    if cfg.data.seq_len > model.max_position:
        raise InputError(
            f"data.seq_len={cfg.data.seq_len} is longer than the model's context "
            f"({model.max_position}): lower it, or raise model.max_position"
        )
    return model, functools.partial(_first_params, cfg, model)


def _first_params(cfg: LMConfig, model: ModelConfig) -> dict:
    """The checkpoint's float32 params, or random ones of a new model."""
    if not cfg.model.init_from:
        return init_params(model, jax.random.key(cfg.run.seed))
    with waiting(f"loading {cfg.model.init_from}"):
        _, params = load_pretrained(locate(cfg.model.init_from))
    return params


def _new_model(section: Model, vocab_size: int, ends: DocumentEnds) -> ModelConfig:
    """A Llama architecture of the config's sizes."""
    not_sizes = ("init_from", "compute_dtype", "remat", "router_aux_loss")
    sizes = {name: value for name, value in vars(section).items() if name not in not_sizes}
    sizes["vocab_size"] = vocab_size
    sizes["num_kv_heads"] = section.num_kv_heads or None
    # A tokenizer without BOS: a text begins as after the end of another.
    bos_id = ends.eos_id if ends.bos_id is None else ends.bos_id
    return ModelConfig.llama(**sizes, eos_ids=(ends.eos_id,), bos_id=bos_id)


def get_tokenizer(
    cfg: LMConfig, documents: list[Document] | None, directory: Path, resume: bool = False
) -> Tokenizer:
    """The configured tokenizer, else the checkpoint's.

    For a new model without one it is trained on the corpus, and kept in ``directory``. A run that
    is resumed reads it there, and so do other processes than the first one.

    Raises:
      InputError: it cannot be read; or there is none, and the corpus is not in memory.
    """
    file = _tokenizer_file(cfg)
    if file is not None:
        return load_tokenizer(file)
    if documents is None:
        raise InputError(
            "data.shards needs tokenizer.path: to train a tokenizer, run on a part of the corpus "
            "without data.shards"
        )
    own = directory / "tokenizer.json"
    if own.exists() and (resume or not processes.is_main_process()):
        return load_tokenizer(own)
    return train_tokenizer(documents, cfg.tokenizer.vocab_size, own)
