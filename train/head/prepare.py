"""Prepare a run of ``train.head`` before any weight is read: target, corpus, head architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from specjax._util.errors import InputError, ModelError
from specjax.lm import locate
from specjax.models import ModelConfig
from specjax.models.families.head_config import HeadConfig
from specjax.models.hf.read import complete_config
from train.config import HeadRunConfig, HeadSection
from train.data.chats import ChatFormat, chat_format
from train.data.document_ends import checkpoint_ends
from train.data.fim import CodeLayout
from train.data.prompts import PROMPT_TOKENS
from train.data.tokenized import Corpus
from train.data.tokenizer import id_count, load_tokenizer, tokenizer_file
from train.engine.batches import open_corpus
from train.engine.shares import require_model_axis
from train.engine.starting import require_model
from train.head.starting import read_start


class TargetFiles(NamedTuple):
    """What the small files of the target's checkpoint say."""

    directory: Path
    config: ModelConfig
    tokenizer: Tokenizer
    layout: CodeLayout  # how a document becomes tokens
    chats: ChatFormat  # how a conversation does


class HeadSetup(NamedTuple):
    """What a run needs: everything but its weights."""

    directory: Path  # of the target
    tokenizer: Tokenizer
    target: ModelConfig
    head: HeadConfig
    start: Path | None  # of the head whose weights the first ones are; None: random
    data: Corpus
    coverage: float  # the share of the corpus's tokens that the head can draft


def prepare_setup(cfg: HeadRunConfig, cache: Path | None) -> HeadSetup:
    """Reads the target's config and tokenizer, and the corpus.

    Args:
      cache: as for :func:`open_corpus`.

    Raises:
      InputError, ModelError: the config does not fit the target.
    """
    files = read_target(cfg)
    # Wrong sizes are found before the corpus is read.
    if cfg.head.init_from:
        start, head = read_start(cfg, files.config, files.directory)
    else:
        start = None
        head = make_head(cfg, files.config, None)
    require_model_axis(head, cfg.mesh.model)
    data = open_corpus(cfg.data, files.tokenizer, files.layout, cache, chats=files.chats)
    counts = data.counts(files.config.vocab_size)[0]
    if start is None and cfg.head.draft_vocab:
        head = make_head(cfg, files.config, most_frequent(counts, cfg.head.draft_vocab))
    drafted = counts if head.ids is None else counts[head.ids]
    coverage = float(drafted.sum() / max(1, counts.sum()))
    return HeadSetup(files.directory, files.tokenizer, files.config, head, start, data, coverage)


def read_target(cfg: HeadRunConfig) -> TargetFiles:
    """Reads the target's config and tokenizer.

    Raises:
      InputError, ModelError: they are missing, or the config does not fit the target.
    """
    if not cfg.model.init_from:
        raise InputError("model.init_from is empty: name the target's Hugging Face directory")
    directory = locate(cfg.model.init_from)
    target = complete_config(directory)
    require_model(target, cfg.model.init_from)
    file = Path(cfg.model.tokenizer or tokenizer_file(directory))
    tokenizer = load_tokenizer(file)
    _check(cfg, target, tokenizer)
    layout = CodeLayout(*checkpoint_ends(cfg.model.init_from, target, tokenizer))
    chats = chat_format(cfg.data, tokenizer, file.parent)
    return TargetFiles(directory, target, tokenizer, layout, chats)


def most_frequent(counts: np.ndarray, size: int) -> np.ndarray:
    """The ``size`` ids of largest count, ascending; of equal counts the lower ids."""
    return np.sort(np.argsort(-counts, kind="stable")[:size])


def make_head(cfg: HeadRunConfig, target: ModelConfig, ids: np.ndarray | None) -> HeadConfig:
    """The head's architecture; it has the target's hidden size and shares its embedding.

    Args:
      ids: the ids that the head drafts; None: all.
    """
    section = cfg.head
    # A size of 0 is left out: the target's is the default.
    options: dict[str, Any] = {}
    if section.num_kv_heads:
        options["num_kv_heads"] = section.num_kv_heads
    if section.intermediate_size:
        options["intermediate_size"] = section.intermediate_size
    if section.layers:
        options["layer_ids"] = section.layers
    try:
        return HeadConfig.of(
            target,
            ids,
            norm_before_residual=section.norm_before_residual,
            own_embedding=False,
            verifier=cfg.model.init_from,
            **options,
        )
    except ModelError as error:
        raise InputError(f"head: {error}") from None


def _check(cfg: HeadRunConfig, target: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raises InputError if the config does not fit the target."""
    name = cfg.model.init_from
    section = cfg.head
    if target.vocab_size < id_count(tokenizer):
        raise InputError(
            f"model.init_from={name!r} has {target.vocab_size} ids, the tokenizer "
            f"{id_count(tokenizer)}: set model.tokenizer to its own"
        )
    decoded = PROMPT_TOKENS + section.decode_tokens if section.decode_prompts else 0
    longest = max(cfg.data.seq_len, decoded)
    if longest + section.steps > target.max_position:
        raise InputError(
            f"data.seq_len={cfg.data.seq_len} or head.decode_tokens={section.decode_tokens} is "
            f"longer than the target's context ({target.max_position}) holds: lower it"
        )
    _check_sizes(section, target)
    require_model_axis(target, cfg.mesh.model)
    if target.embed_size not in (None, target.hidden_size):
        raise InputError(
            f"model.init_from={name!r} has an embedding of width {target.embed_size} and hidden "
            f"states of {target.hidden_size}: a head cannot share it"
        )


def _check_sizes(section: HeadSection, target: ModelConfig) -> None:
    if section.draft_vocab > target.vocab_size:
        raise InputError(
            f"head.draft_vocab={section.draft_vocab} is more than the target's "
            f"{target.vocab_size} ids: lower it, or 0 for all"
        )
    wrong = [layer for layer in section.layers if layer >= target.num_layers]
    if wrong:
        raise InputError(
            f"head.layers: {wrong[0]} is not a layer of the target, 0 to {target.num_layers - 1}"
        )
    heads = section.num_kv_heads or target.num_kv_heads
    if target.num_heads % heads:
        raise InputError(
            f"head.num_kv_heads={heads} does not divide the target's {target.num_heads} heads"
        )
