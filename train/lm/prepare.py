"""Prepare a run of ``train.lm`` before any weight is read: tokenizer, architecture, corpus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
from tokenizers import Tokenizer

from specjax._util.errors import InputError
from specjax.models import ModelConfig, init_params, load_pretrained
from train.config import LMConfig, Model
from train.data.encoding import Layout, Plain
from train.data.fim import CodeLayout, frame_of
from train.data.reading import Document
from train.data.shards.building import load_documents
from train.data.tokenized import Corpus
from train.data.tokenizer import EOS_ID, load_tokenizer, train_tokenizer
from train.engine.batches import open_corpus


class LmSetup(NamedTuple):
    """What a run needs: everything but its weights, and a function that makes the first weights."""

    tokenizer: Tokenizer
    model: ModelConfig
    first_params: Callable[[], dict]
    data: Corpus


def prepare_setup(cfg: LMConfig, directory: Path, cache: Path | None) -> LmSetup:
    """Reads the tokenizer or trains it in the run's ``directory``, and reads the corpus.

    Args:
      cache: as for :func:`open_corpus`.
    """
    documents = read_documents(cfg)
    tokenizer = get_tokenizer(cfg, documents, directory)
    model, first_params = build_model(cfg, tokenizer.get_vocab_size())
    data = open_corpus(cfg.data, tokenizer, layout(cfg, model, tokenizer), cache, documents)
    return LmSetup(tokenizer, model, first_params, data)


def read_documents(cfg: LMConfig) -> list[Document] | None:
    """The corpus as text; None if its tokens are in shards, whose text is never in memory."""
    if cfg.data.shards:
        return None
    return load_documents(cfg.data)


def layout(cfg: LMConfig, model: ModelConfig, tokenizer: Tokenizer) -> Layout:
    """How a document becomes tokens; for a checkpoint, between its own BOS and EOS."""
    start = cfg.model.init_from
    if not start:
        return Plain()
    return CodeLayout(*frame_of(start, model, tokenizer))


def build_model(cfg: LMConfig, vocab_size: int) -> tuple[ModelConfig, Callable[[], dict]]:
    """The architecture, and a function that makes its first params.

    Raises:
      InputError: the tokenizer has more ids than the model, or rows are longer than its context.
    """
    if cfg.model.init_from:
        model, params = load_pretrained(cfg.model.init_from)
    else:
        model = _new_model(cfg.model, vocab_size)
        params = None
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
    return model, lambda: params or init_params(model, jax.random.key(cfg.run.seed))


def _new_model(section: Model, vocab_size: int) -> ModelConfig:
    """A Llama architecture of the config's sizes."""
    not_sizes = ("init_from", "compute_dtype", "remat")
    sizes = {name: value for name, value in vars(section).items() if name not in not_sizes}
    sizes["vocab_size"] = vocab_size
    sizes["num_kv_heads"] = section.num_kv_heads or None
    return ModelConfig.llama(**sizes, eos_ids=(EOS_ID,), bos_id=EOS_ID)


def get_tokenizer(cfg: LMConfig, documents: list[Document] | None, directory: Path) -> Tokenizer:
    """The configured tokenizer, or one that is trained on the corpus and kept in ``directory``.

    Raises:
      InputError: it cannot be read; or none is configured, and the corpus is not in memory.
    """
    if documents is None and not cfg.tokenizer.path:
        raise InputError(
            "data.shards needs tokenizer.path: to train a tokenizer, run on a part of the corpus "
            "without data.shards"
        )
    if cfg.tokenizer.path:
        return load_tokenizer(cfg.tokenizer.path)
    own = directory / "tokenizer.json"
    if own.exists():
        return load_tokenizer(own)
    return train_tokenizer(documents, cfg.tokenizer.vocab_size, own)
