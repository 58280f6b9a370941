"""What a config, a target's small files and the corpus decide before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from specjax._util.errors import InputError, ModelError
from specjax.lm import locate
from specjax.models import ModelConfig
from specjax.models.families.head_config import HeadConfig
from specjax.models.hf.read import load_config
from train.config import HeadRunConfig
from train.data.fim import CodeLayout, frame_of
from train.data.packing import Corpus
from train.data.prompts import PROMPT_TOKENS
from train.data.tokenizer import load_tokenizer, tokenizer_file
from train.engine.feeding import own_corpus


class HeadRun(NamedTuple):
    """All that a run is made of but its weights."""

    directory: Path  # of the target
    tokenizer: Tokenizer
    target: ModelConfig
    head: HeadConfig
    data: Corpus
    coverage: float  # the share of the corpus's tokens that the head can draft


def prepare_setup(cfg: HeadRunConfig, cache: Path | None) -> HeadRun:
    """Reads the target's config and tokenizer and the corpus, whose tokens ``cache`` keeps.

    Without a ``cache`` nothing is written: shards must be there.

    Raises:
      InputError, ModelError: the config and the target do not go together.
    """
    directory, target, tokenizer, layout = read_target(cfg)
    data = own_corpus(cfg.data, tokenizer, layout, cache)
    counts = data.counts(target.vocab_size)[0]
    ids = commonest(counts, cfg.head.draft_vocab) if cfg.head.draft_vocab else None
    coverage = 1.0 if ids is None else float(counts[ids].sum() / max(1, counts.sum()))
    head = make_head(cfg, target, ids)
    return HeadRun(directory, tokenizer, target, head, data, coverage)


def read_target(cfg: HeadRunConfig) -> tuple[Path, ModelConfig, Tokenizer, CodeLayout]:
    """The target's directory, config and tokenizer, and how a document becomes tokens.

    Raises:
      InputError, ModelError: the config and the target do not go together.
    """
    if not cfg.model.init_from:
        raise InputError("model.init_from is empty: name the target's Hugging Face directory")
    directory = locate(cfg.model.init_from)
    target = load_config(directory)
    if isinstance(target, HeadConfig):
        raise InputError(f"model.init_from={cfg.model.init_from!r} is a head: name its target")
    tokenizer = load_tokenizer(cfg.model.tokenizer or tokenizer_file(directory))
    _check(cfg, target, tokenizer)
    layout = CodeLayout(*frame_of(cfg.model.init_from, target, tokenizer))
    return directory, target, tokenizer, layout


def commonest(counts: np.ndarray, size: int) -> np.ndarray:
    """The ``size`` ids of largest count, ascending; of equal counts the lower ids."""
    return np.sort(np.argsort(-counts, kind="stable")[:size])


def make_head(cfg: HeadRunConfig, target: ModelConfig, ids: np.ndarray | None) -> HeadConfig:
    """The head's architecture: as wide as its target, whose embedding it shares."""
    section = cfg.head
    sizes = ("num_kv_heads", "intermediate_size")
    other = {name: size for name in sizes if (size := getattr(section, name))}
    if section.layers:
        other["layer_ids"] = section.layers
    try:
        return HeadConfig.of(
            target,
            ids,
            norm_before_residual=section.norm_before_residual,
            own_embedding=False,
            verifier=cfg.model.init_from,
            **other,
        )
    except ModelError as error:
        raise InputError(f"head: {error}") from None


def _check(cfg: HeadRunConfig, target: ModelConfig, tokenizer: Tokenizer) -> None:
    name, section = cfg.model.init_from, cfg.head
    if target.vocab_size < tokenizer.get_vocab_size():
        raise InputError(
            f"model.init_from={name!r} has {target.vocab_size} ids, the tokenizer "
            f"{tokenizer.get_vocab_size()}: set model.tokenizer to its own"
        )
    longest = max(cfg.data.seq_len, PROMPT_TOKENS + section.decode_tokens)
    if longest + section.steps > target.max_position:
        raise InputError(
            f"data.seq_len={cfg.data.seq_len} or head.decode_tokens={section.decode_tokens} is "
            f"longer than the target's context ({target.max_position}) holds: lower it"
        )
    if section.draft_vocab > target.vocab_size:
        raise InputError(
            f"head.draft_vocab={section.draft_vocab} is more than the target's "
            f"{target.vocab_size} ids: lower it, or 0 for all"
        )
    wrong = [layer for layer in section.layers if layer >= target.num_layers]
    if wrong:
        raise InputError(
            f"head.layers: {wrong[0]} is none of the target's layers, 0 to {target.num_layers - 1}"
        )
    heads = section.num_kv_heads or target.num_kv_heads
    if target.num_heads % heads:
        raise InputError(
            f"head.num_kv_heads={heads} does not divide the target's {target.num_heads} heads"
        )
    if target.embed_size not in (None, target.hidden_size):
        raise InputError(
            f"model.init_from={name!r} has an embedding of width {target.embed_size} and hidden "
            f"states of {target.hidden_size}: a head cannot share it"
        )
