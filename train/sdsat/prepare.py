"""Prepare a run of ``train.sdsat`` from its config and the checkpoint's small files.

Decides which ids are adaptive, how documents and rows are laid out, what is minimized and which
parameters are trained. Checks that all of it fits together, before any weight is read.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from specjax._util.errors import InputError
from specjax.models import ModelConfig, param_shapes
from specjax.runtime.infill import find_sentinels
from train.config import Adaptive, SDSATConfig, Tuned
from train.data.chats import ChatFormat, chat_format
from train.data.document_ends import checkpoint_ends
from train.data.fim import CodeLayout
from train.data.packing import Transform
from train.data.prompts import PROMPT_TOKENS
from train.data.tokenized import Corpus
from train.data.tokenizer import id_count, load_tokenizer, tokenizer_file
from train.engine.shares import require_model_axis
from train.engine.starting import with_router_loss
from train.sdsat.insertion import (
    PROBE_EVERY,
    Insertion,
    appended_slots,
    isolated_row,
    mixed_row,
    probe_row,
    probe_slots,
)
from train.sdsat.losses import SdsatObjective
from train.sdsat.starting import Start, find_start
from train.sdsat.trainable import GATED, LOW_RANK, Tuning, adapted, make_tuning


class SdsatSetup(NamedTuple):
    """What a run needs: everything but its weights and its corpus."""

    start: Start
    tokenizer: Tokenizer
    model: ModelConfig  # of the result: with adaptive ids, and a vocabulary that holds them
    new_rows: int  # rows that embedding and head grow by
    insertion: Insertion
    layout: CodeLayout
    chats: ChatFormat  # how a conversation becomes tokens
    objective: SdsatObjective
    tuning: Tuning


class RowTransforms(NamedTuple):
    """How packed rows are laid out, for training and for the held-out loss."""

    training: Transform
    held_out: Transform


def prepare_setup(cfg: SDSATConfig) -> SdsatSetup:
    """Reads the checkpoint's config and tokenizer, and chooses the adaptive ids.

    Raises:
      InputError, ModelError: the config does not fit the checkpoint.
    """
    found = find_start(cfg.model)
    start = found.config  # the model as it is before tuning
    file = Path(cfg.model.tokenizer or tokenizer_file(found.directory))
    tokenizer = load_tokenizer(file)
    _check(cfg, start, tokenizer)

    section = cfg.sdsat
    ids, new_rows = choose_ids(section, start, tokenizer)
    if found.delta is not None and set(ids) != set(found.delta.adaptive_ids):
        raise InputError(
            f"model.init_from={cfg.model.init_from!r} has the adaptive ids "
            f"{sorted(set(found.delta.adaptive_ids))}: leave sdsat.ids empty, and set "
            "sdsat.distinct and sdsat.window as they were"
        )
    if cfg.model.train == GATED:
        new_rows = 0  # nothing grows: the adapters hold the rows of the ids
    if not section.distinct:
        ids = ids * section.window

    earlier = None if found.delta is None else found.adapters
    eos_id, bos_id = checkpoint_ends(cfg.model.init_from, start, tokenizer)
    tuned = with_router_loss(start, cfg.model.router_aux_loss)
    return SdsatSetup(
        start=found,
        tokenizer=tokenizer,
        model=dataclasses.replace(tuned, vocab_size=start.vocab_size + new_rows, adaptive_ids=ids),
        new_rows=new_rows,
        insertion=Insertion(ids, _special_ids(start, tokenizer), section.start_rate, cfg.run.seed),
        layout=CodeLayout(
            eos_id, bos_id, find_sentinels(tokenizer), section.fim_rate, cfg.run.seed
        ),
        chats=chat_format(cfg.data, tokenizer, file.parent),
        objective=_objective(cfg),
        tuning=make_tuning(cfg.model, ids, cfg.run.seed, earlier),
    )


def _objective(cfg: SDSATConfig) -> SdsatObjective:
    section = cfg.sdsat
    self_share = {"data": 0.0, "self": 1.0, "mix": section.mix}[section.adaptive_targets]
    return SdsatObjective(
        loss=section.loss,
        window=section.window,
        self_share=self_share,
        weight=section.weight,
        dtype=cfg.model.compute_dtype,
        remat=cfg.model.remat,
        scan=cfg.model.scan,
    )


def _check(cfg: SDSATConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raises InputError if the config does not fit the checkpoint."""
    _check_model(cfg, model, tokenizer)
    _check_objective(cfg.sdsat)
    _check_split(cfg)
    require_model_axis(model, cfg.mesh.model)
    if cfg.model.train != "full" and cfg.optim.optimizer != "adamw":
        raise InputError(
            f"optim.optimizer={cfg.optim.optimizer!r} with model.train="
            f"{cfg.model.train!r}: only adamw trains parts of a model"
        )
    if cfg.model.train in LOW_RANK:
        _check_low_rank(cfg.model, model)


def _check_model(cfg: SDSATConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raises InputError if the vocabulary or the context is too small."""
    name = cfg.model.init_from
    section = cfg.sdsat
    if model.vocab_size < id_count(tokenizer):
        raise InputError(
            f"model.init_from={name!r} has {model.vocab_size} ids, the tokenizer "
            f"{id_count(tokenizer)}: set model.tokenizer to its own"
        )
    decoded = PROMPT_TOKENS + section.decode_tokens + section.held_out_window
    if section.decode_prompts and decoded > model.max_position:
        raise InputError(
            f"sdsat.decode_tokens={section.decode_tokens} after {PROMPT_TOKENS} of a prompt are "
            f"more than the model's context ({model.max_position}) holds: lower it"
        )
    if cfg.data.seq_len > model.max_position:
        raise InputError(
            f"data.seq_len={cfg.data.seq_len} is longer than the model's context "
            f"({model.max_position}): lower it"
        )


def _check_objective(section: Adaptive) -> None:
    """Raises InputError if the section's values contradict each other."""
    if section.loss == "basic" and section.adaptive_targets != "data":
        raise InputError(
            f"sdsat.adaptive_targets={section.adaptive_targets!r} needs a clean sequence, "
            "which loss basic lacks: use improved, isolated, or data"
        )
    if section.start_rate == 0 and section.loss != "basic":
        raise InputError("sdsat.start_rate=0 leaves no adaptive tokens: only loss basic takes it")
    if section.distinct and section.probe_length > section.window:
        raise InputError(
            f"sdsat.probe_length={section.probe_length}, but {section.window} "
            "distinct ids serve windows of that length at most: lower it"
        )


def _check_split(cfg: SDSATConfig) -> None:
    """Raises InputError if the tokens appended to a row do not divide among its devices."""
    section = cfg.sdsat
    length = cfg.data.seq_len
    appended = {"held-out": probe_slots(length, section.held_out_window)}
    if section.loss == "isolated":
        appended["training"] = appended_slots(section.window, section.start_rate, length)
    for kind, tokens in appended.items():
        if tokens % cfg.mesh.sequence:
            raise InputError(
                f"mesh.sequence={cfg.mesh.sequence} does not divide the {tokens} tokens appended "
                f"to a {kind} row: make data.seq_len a multiple of "
                f"{PROBE_EVERY * cfg.mesh.sequence}, or choose 2, 4 or 8"
            )


def _check_low_rank(section: Tuned, model: ModelConfig) -> None:
    """Raises InputError if a matrix is unknown, or the rank is larger than one has."""
    matrices = adapted({"0": param_shapes(model)["layers"]["0"]}, section)
    names = {name for *_, name in matrices}
    unknown = sorted(set(section.lora_matrices) - names)
    if unknown:
        raise InputError(
            f"model.lora_matrices: {section.init_from!r} has no matrix {unknown[0]!r} in its blocks"
        )
    highest = min(min(x.shape) for x in matrices.values())
    if section.lora_rank > highest:
        raise InputError(
            f"model.lora_rank={section.lora_rank}: the smallest matrix has rank {highest} at most"
        )


def choose_ids(
    section: Adaptive, model: ModelConfig, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], int]:
    """(the adaptive ids, the number of rows by which embedding and LM head grow).

    The first that applies: the configured ids; the adaptive ids of the checkpoint, if it has as
    many; ids that the tokenizer does not use; new rows.
    """
    count = section.window if section.distinct else 1
    if section.ids:
        _check_ids(section.ids, count, model, tokenizer)
        return section.ids, 0
    earlier = tuple(dict.fromkeys(model.adaptive_ids))
    if len(earlier) == count:
        return earlier, 0
    unused = _first_unused_id(tokenizer)
    if model.vocab_size - unused >= count:
        return tuple(range(unused, unused + count)), 0
    return tuple(range(model.vocab_size, model.vocab_size + count)), count


def _check_ids(ids: tuple[int, ...], count: int, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raises InputError if the configured ids are of another number, or cannot be adaptive."""
    if len(set(ids)) != len(ids) or len(ids) != count:
        kind = "distinct ids, one per place" if count > 1 else "id, repeated"
        raise InputError(
            f"sdsat.ids={list(ids)}: sdsat.window and sdsat.distinct ask for {count} {kind}"
        )
    # Whether text uses the ids of ordinary tokens is checked later, on the corpus: check_absent.
    used = _control_ids(model, tokenizer)
    for i in ids:
        if not 0 <= i < model.vocab_size:
            raise InputError(
                f"sdsat.ids: {i} is outside the vocabulary of {model.vocab_size}: "
                "leave sdsat.ids empty to append new rows"
            )
        if i in used:
            raise InputError(
                f"sdsat.ids: {i} is {tokenizer.id_to_token(i)!r}, which real text "
                "uses: name unused ids, or leave sdsat.ids empty"
            )


def check_absent(setup: SdsatSetup, data: Corpus) -> None:
    """Raises InputError if the corpus holds an adaptive id."""
    present = np.flatnonzero(data.counts(setup.model.vocab_size).sum(axis=0))
    for i in sorted(set(setup.model.adaptive_ids) & set(present.tolist())):
        raise InputError(
            f"sdsat.ids: {i} is {setup.tokenizer.id_to_token(i)!r}, which the corpus holds: "
            "name unused ids, or leave sdsat.ids empty"
        )


def _first_unused_id(tokenizer: Tokenizer) -> int:
    """From this id on, no id stands for a token of the tokenizer."""
    return id_count(tokenizer)


def _special_ids(model: ModelConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that no window crosses: special tokens of the tokenizer, and control ids."""
    ids = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return tuple(sorted(ids | _control_ids(model, tokenizer)))


def _control_ids(model: ModelConfig, tokenizer: Tokenizer) -> set[int]:
    """EOS, BOS, padding and the infilling sentinels."""
    ids = {i for i in (*model.eos_ids, model.bos_id, model.pad_id) if i is not None}
    sentinels = find_sentinels(tokenizer)
    if sentinels:
        ids |= set(dataclasses.astuple(sentinels))
    return ids


def transforms(cfg: SDSATConfig, insertion: Insertion) -> RowTransforms:
    """The row layouts of the config's loss and of the held-out loss."""
    lay_out = isolated_row if cfg.sdsat.loss == "isolated" else mixed_row
    return RowTransforms(
        training=functools.partial(lay_out, insertion),
        held_out=functools.partial(probe_row, insertion, length=cfg.sdsat.held_out_window),
    )
