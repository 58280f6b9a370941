"""What a config of ``train.lm`` and its corpus decide: tokenizer, architecture, tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
from tokenizers import Tokenizer

from specjax._util.errors import InputError
from specjax.models import ModelConfig, init_params, load_pretrained
from train.config import LMConfig
from train.data.fim import CodeLayout, frame_of
from train.data.making import own_documents
from train.data.packing import Corpus, Layout, Plain
from train.data.reading import Document
from train.data.tokenizer import EOS_ID, load_tokenizer, train_tokenizer
from train.engine.feeding import own_corpus


class LmRun(NamedTuple):
    """All that a run is made of but its weights, and a function that makes the first of these."""

    tokenizer: Tokenizer
    model: ModelConfig
    first_params: Callable[[], dict]
    data: Corpus


def prepare_setup(cfg: LMConfig, directory: Path, cache: Path | None) -> LmRun:
    """Reads or trains the tokenizer, in the run's ``directory``, and reads the corpus.

    ``cache`` as for :func:`own_corpus`.
    """
    documents = read_documents(cfg)
    tokenizer = get_tokenizer(cfg, documents, directory)
    model, first_params = build_model(cfg, tokenizer.get_vocab_size())
    laid = layout(cfg, model, tokenizer)
    data = own_corpus(cfg.data, tokenizer, laid, cache, documents)
    return LmRun(tokenizer, model, first_params, data)


def read_documents(cfg: LMConfig) -> list[Document] | None:
    """The corpus; None where its tokens are in shards, so that it is read as a stream."""
    return None if cfg.data.shards else own_documents(cfg.data)


def layout(cfg: LMConfig, model: ModelConfig, tokenizer: Tokenizer) -> Layout:
    """How a document becomes tokens: of a checkpoint, between its own ids."""
    start = cfg.model.init_from
    return CodeLayout(*frame_of(start, model, tokenizer)) if start else Plain()


def build_model(cfg: LMConfig, vocab_size: int) -> tuple[ModelConfig, Callable[[], dict]]:
    """The architecture, and a function that makes its first params.

    Raises:
      InputError: the tokenizer has more ids, or the rows more tokens, than it takes.
    """
    if cfg.model.init_from:
        model, params = load_pretrained(cfg.model.init_from)
    else:
        others = ("init_from", "compute_dtype", "remat")
        sizes = {name: value for name, value in vars(cfg.model).items() if name not in others}
        sizes |= {"vocab_size": vocab_size, "num_kv_heads": cfg.model.num_kv_heads or None}
        model, params = ModelConfig.llama(**sizes, eos_ids=(EOS_ID,), bos_id=EOS_ID), None
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


def get_tokenizer(cfg: LMConfig, documents: list[Document] | None, directory: Path) -> Tokenizer:
    """The configured tokenizer, or one trained on the corpus and kept in the run.

    Raises:
      InputError: none is configured, and the corpus is not in memory; or it cannot be read.
    """
    if documents is None and not cfg.tokenizer.path:
        raise InputError(
            "data.shards needs tokenizer.path: a run on a part of the corpus, without data.shards, "
            "trains one"
        )
    if cfg.tokenizer.path:
        return load_tokenizer(cfg.tokenizer.path)
    own = directory / "tokenizer.json"
    if own.exists():
        return load_tokenizer(own)
    return train_tokenizer(documents, cfg.tokenizer.vocab_size, own)
