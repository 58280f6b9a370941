"""SDSAT: fine-tunes a checkpoint to draft for itself with adaptive tokens.

python -m train.sdsat CONFIG.toml [--set section.key=value ...] [--resume] [--dry-run] [--json]
    [--distributed HOST:PORT,COUNT,INDEX]
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from specjax.errors import InputError, SpecjaxError
from specjax.files import write_text
from specjax.infill import find_sentinels
from specjax.lm import locate
from specjax.models import (
    ModelConfig,
    from_hf,
    load_pretrained,
    num_params,
    param_shapes,
    save_pretrained,
)
from specjax.models.hf.checkpoint import read_config
from train.cli import run_program
from train.config import Adaptive, SDSATConfig
from train.data.corpus import load_corpus
from train.data.fim import CodeLayout
from train.data.packing import Batch, Prepared, Transform, make_loader, prepare, valid_batches
from train.data.tokenizer import load_tokenizer
from train.engine import processes
from train.engine.loop import LossFn, Outcome, fit
from train.engine.optim import make_optimizer
from train.engine.placement import Placement, host_memory, make_placement
from train.lm.program import check_directory, make_directory
from train.sdsat import trainable as tuning
from train.sdsat.evaluation import PROMPT_TOKENS, Decoding, held_out_prompts, measure_decoding
from train.sdsat.insertion import Insertion, appended_slots, isolated_row, mixed_row, probe_row
from train.sdsat.losses import Objective, probe_loss, sdsat_loss, weigh

# Small files of the checkpoint that the exported one needs as they are.
COPIED = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "tokenizer.model",
    "chat_template.jinja",
)


class Setup(NamedTuple):
    """What a config and a checkpoint's small files decide; no weights."""

    directory: Path  # of the checkpoint
    tokenizer: Tokenizer
    model: ModelConfig  # of the result: with adaptive ids, and grown for them
    new_rows: int
    insertion: Insertion
    layout: CodeLayout
    objective: Objective


def prepare_setup(cfg: SDSATConfig) -> Setup:
    """Reads the checkpoint's config and tokenizer and settles the adaptive ids.

    Raises:
      InputError, ModelError: the config and the checkpoint do not go together.
    """
    if not cfg.model.init_from:
        raise InputError("model.init_from is empty: name a Hugging Face directory to tune")
    directory = locate(cfg.model.init_from)
    start = from_hf(read_config(directory))
    tokenizer = load_tokenizer(cfg.model.tokenizer or _tokenizer_file(directory))
    _check(cfg, start, tokenizer)
    ids, new_rows = choose_ids(cfg.sdsat, start, tokenizer)
    repeated = ids if cfg.sdsat.distinct else ids * cfg.sdsat.window
    model = dataclasses.replace(
        start, vocab_size=start.vocab_size + new_rows, adaptive_ids=repeated
    )
    insertion = Insertion(
        repeated, _special_ids(start, tokenizer), cfg.sdsat.start_rate, cfg.run.seed
    )
    return Setup(
        directory,
        tokenizer,
        model,
        new_rows,
        insertion,
        _layout(cfg, start, tokenizer),
        objective_of(cfg),
    )


def _tokenizer_file(directory: Path) -> Path:
    """The checkpoint's tokenizer.json, or its parent's: the embedded models share one."""
    homes = [home for home in (directory, directory.parent) if (home / "tokenizer.json").exists()]
    return (homes or [directory])[0] / "tokenizer.json"


def _check(cfg: SDSATConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
    name, section = cfg.model.init_from, cfg.sdsat
    if model.vocab_size < tokenizer.get_vocab_size():
        raise InputError(
            f"model.init_from={name!r} has {model.vocab_size} ids, the tokenizer "
            f"{tokenizer.get_vocab_size()}: set model.tokenizer to its own"
        )
    if not model.eos_ids:
        raise InputError(f"model.init_from={name!r}: config.json names no eos_token_id")
    decoded = PROMPT_TOKENS + section.decode_tokens + (section.probe_length or section.window)
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
    if section.loss == "basic" and section.adaptive_targets != "data":
        raise InputError(
            f"sdsat.adaptive_targets={section.adaptive_targets!r} needs a clean stream, which "
            "loss basic lacks: use improved, isolated, or data"
        )
    if section.start_rate == 0 and section.loss != "basic":
        raise InputError("sdsat.start_rate=0 leaves no adaptive tokens: only loss basic takes it")
    if section.distinct and section.probe_length > section.window:
        raise InputError(
            f"sdsat.probe_length={section.probe_length}, but {section.window} "
            "distinct ids serve windows of that length at most: lower it"
        )
    if cfg.model.train != "full" and cfg.optim.optimizer != "adamw":
        raise InputError(
            f"optim.optimizer={cfg.optim.optimizer!r} with model.train="
            f"{cfg.model.train!r}: only adamw trains parts of a model"
        )


def choose_ids(
    section: Adaptive, model: ModelConfig, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], int]:
    """The adaptive ids and how many rows the tables grow by.

    In order: the configured ids; those of a checkpoint that has them; vocabulary that the
    tokenizer does not use; new rows.
    """
    count = section.window if section.distinct else 1
    if section.ids:
        _check_ids(section.ids, count, model, tokenizer)
        return section.ids, 0
    had = tuple(dict.fromkeys(model.adaptive_ids))
    if len(had) == count:
        return had, 0
    used = _used_ids(tokenizer)
    if model.vocab_size - used >= count:
        return tuple(range(used, used + count)), 0
    return tuple(range(model.vocab_size, model.vocab_size + count)), count


def _check_ids(ids: tuple[int, ...], count: int, model: ModelConfig, tokenizer: Tokenizer) -> None:
    if len(set(ids)) != len(ids) or len(ids) != count:
        kind = "distinct ids, one per place" if count > 1 else "id, repeated"
        raise InputError(
            f"sdsat.ids={list(ids)}: sdsat.window and sdsat.distinct ask for {count} {kind}"
        )
    used = _used_ids(tokenizer)
    # Tokens added beside the text's own, for no purpose that is known: <reserved> and the like.
    spare = set(tokenizer.get_added_tokens_decoder()) - _control_ids(model, tokenizer)
    for i in ids:
        if not 0 <= i < model.vocab_size:
            raise InputError(
                f"sdsat.ids: {i} is outside the vocabulary of {model.vocab_size}: "
                "leave sdsat.ids empty to append new rows"
            )
        if i < used and i not in spare:
            raise InputError(
                f"sdsat.ids: {i} is {tokenizer.id_to_token(i)!r}, which real text "
                "uses: name unused ids, or leave sdsat.ids empty"
            )


def _check_absent(setup: Setup, data: Prepared) -> None:
    """Raises InputError where the corpus holds an adaptive id."""
    for i in sorted(set(setup.model.adaptive_ids)):
        if np.any(data.train == i) or np.any(data.valid == i):
            token = setup.tokenizer.id_to_token(i)
            raise InputError(
                f"sdsat.ids: {i} is {token!r}, which the corpus holds: name unused "
                "ids, or leave sdsat.ids empty"
            )


def _used_ids(tokenizer: Tokenizer) -> int:
    """Ids from here on stand for no token: text never has them and decoding never emits them."""
    return max(tokenizer.get_vocab().values()) + 1


def _special_ids(model: ModelConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that no window crosses: those that end or begin a text, and the sentinels."""
    ids = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return tuple(sorted(ids | _control_ids(model, tokenizer)))


def _control_ids(model: ModelConfig, tokenizer: Tokenizer) -> set[int]:
    """Ids that frame a text: its ends, padding, and the sentinels."""
    ids = {i for i in (*model.eos_ids, model.bos_id, model.pad_id) if i is not None}
    sentinels = find_sentinels(tokenizer)
    return ids | set(dataclasses.astuple(sentinels) if sentinels else ())


def _layout(cfg: SDSATConfig, model: ModelConfig, tokenizer: Tokenizer) -> CodeLayout:
    # The tokenizer's template says whether a text begins with BOS; the config only names it.
    begins = tokenizer.encode("").ids[:1] == [model.bos_id]
    bos = model.bos_id if begins else None
    sentinels = find_sentinels(tokenizer)
    return CodeLayout(model.eos_ids[0], bos, sentinels, cfg.sdsat.fim_rate, cfg.run.seed)


def objective_of(cfg: SDSATConfig) -> Objective:
    """The loss as the config describes it."""
    section = cfg.sdsat
    share = {"data": 0.0, "self": 1.0, "mix": section.mix}[section.adaptive_targets]
    return Objective(
        section.loss,
        section.window,
        share,
        section.weight,
        cfg.model.compute_dtype,
        cfg.model.remat,
        cfg.model.scan,
    )


def grow(params: dict, ids: tuple[int, ...], new_rows: int) -> dict:
    """Embedding and head with ``new_rows`` more rows, and every row ``ids`` at the mean.

    The mean is over the other rows; unused vocabulary may hold anything, even zeros.
    """
    rows = np.asarray(ids)

    def extend(table):
        others = np.setdiff1d(np.arange(len(table)), rows)
        mean = jnp.mean(table[others], axis=0)
        grown = jnp.concatenate([table, jnp.zeros((new_rows, table.shape[1]), table.dtype)])
        return grown.at[rows].set(mean)

    return params | {name: extend(params[name]) for name in tuning.TABLES if name in params}


def first_params(setup: Setup) -> dict:
    """The checkpoint's weights, its tables ready for the adaptive ids."""
    start, params = load_pretrained(setup.directory)
    fresh = tuple(sorted(set(setup.model.adaptive_ids) - set(start.adaptive_ids)))
    return grow(params, fresh, setup.new_rows) if fresh else params


def make_tuning(cfg: SDSATConfig, setup: Setup) -> tuning.Tuning:
    """What of the model is trained."""
    if cfg.model.train == "full":
        return tuning.full()
    if cfg.model.train == "embeddings":
        return tuning.embeddings()
    ids = tuple(sorted(set(setup.model.adaptive_ids)))
    return tuning.lora(ids, cfg.model.lora_rank, cfg.model.lora_alpha, cfg.run.seed)


def transforms(cfg: SDSATConfig, insertion: Insertion) -> tuple[Transform, Transform]:
    """(how a training row is laid out, how a held-out one is)."""

    def mixed(row: Batch, number: int) -> Batch:
        return row | mixed_row(insertion, row, number)

    def isolated(row: Batch, number: int) -> Batch:
        return isolated_row(insertion, row, number)

    length = cfg.sdsat.probe_length or cfg.sdsat.window

    def probes(row: Batch, number: int) -> Batch:
        return probe_row(insertion, row, number, length)

    return (isolated if cfg.sdsat.loss == "isolated" else mixed), probes


def forward_flops(model: ModelConfig, loss: str, window: int, rate: float, seq_len: int) -> float:
    """Floating-point operations of one row's forward pass, ``seq_len`` clean tokens long.

    Two per parameter and token, and attention as it runs: scores and values over every key of
    the sequence, those that the mask hides included. Backward takes twice as many.
    """
    appended = appended_slots(window, rate, seq_len) if loss == "isolated" else 0
    sequences, tokens = (2 if loss == "improved" else 1), seq_len + appended
    lookups = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    products = 2 * (num_params(model) - lookups) * tokens
    attention = 4 * tokens**2 * model.num_heads * model.head_dim * model.num_layers
    return float(sequences * (products + attention))


def plan(cfg: SDSATConfig, setup: Setup, data: Prepared) -> dict:
    """What the run will do, in numbers; clean tokens are those of the corpus."""
    rows = cfg.optim.batch_size * cfg.optim.accumulate
    clean = rows * cfg.data.seq_len
    section = cfg.sdsat
    spare = appended_slots(section.window, section.start_rate, cfg.data.seq_len)
    extra = {"basic": 0, "improved": clean, "isolated": rows * spare}[section.loss]
    shape = (section.window, section.start_rate, cfg.data.seq_len)
    flops = {
        name: forward_flops(setup.model, loss, *shape)
        for name, loss in (("own", section.loss), ("improved", "improved"))
    }
    tuned = make_tuning(cfg, setup)
    trainable = jax.eval_shape(tuned.split, param_shapes(setup.model))[0]
    count = sum(leaf.size for leaf in jax.tree.leaves(trainable))
    return {
        "parameters": num_params(setup.model),
        "trained_parameters": count,
        "vocab_size": setup.model.vocab_size,
        "adaptive_ids": sorted(set(setup.model.adaptive_ids)),
        "new_rows": setup.new_rows,
        "clean_tokens_per_step": clean,
        "forward_tokens_per_step": clean + extra,
        "teraflops_per_step": round(3 * rows * flops["own"] / 1e12, 3),
        "compute_against_improved": round(flops["own"] / flops["improved"], 3),
        "steps": cfg.optim.total_steps,
        # Master weights, and of what is trained: gradient and two moments.
        "state_megabytes": round((4 * num_params(setup.model) + 12 * count) / 1e6, 1),
        "train_tokens": len(data.train),
        "held_out_tokens": data.valid_tokens,
        "epochs": round(clean * cfg.optim.total_steps / max(1, len(data.train)), 2),
    }


def main(cfg: SDSATConfig, resume: bool, dry_run: bool) -> dict:
    """Tunes as the config says; returns the summary that ``--json`` prints."""
    setup, data = processes.together(lambda: _read(cfg, resume, dry_run))
    summary = plan(cfg, setup, data)
    if dry_run:
        from train.sdsat import dryrun  # which needs this file

        return summary | dryrun.dry_run(cfg, setup)
    processes.agree(config=cfg, model=setup.model, corpus=data.fingerprint, jax=jax.__version__)
    return summary | train(cfg, setup, data, resume)


def _read(cfg: SDSATConfig, resume: bool, dry_run: bool) -> tuple[Setup, Prepared]:
    """Everything but the weights; a dry run leaves nothing on the disk."""
    directory = check_directory(cfg.run, resume or dry_run)
    setup = prepare_setup(cfg)
    documents = load_corpus(cfg.data.corpora, cfg.data.files)
    cache = None if dry_run else directory.parent / "cache"
    if not dry_run:
        make_directory(directory)
    data = prepare(documents, setup.tokenizer, cache, setup.layout)
    _check_absent(setup, data)
    return setup, data


def train(cfg: SDSATConfig, setup: Setup, data: Prepared, resume: bool) -> dict:
    """Fits and exports; every process of a run does, and the first one writes."""
    rows = cfg.optim.batch_size
    placement = processes.together(lambda: _placement(cfg))
    tuned = make_tuning(cfg, setup)
    with host_memory():  # one device may be too small for what all of them share
        trainable, frozen = processes.together(lambda: tuned.split(first_params(setup)))
    length = cfg.sdsat.probe_length or cfg.sdsat.window
    laid, probed = transforms(cfg, setup.insertion)
    process, count = jax.process_index(), jax.process_count()
    valid = valid_batches(data, cfg.data.seq_len, rows, cfg.run.eval_batches, probed)
    outcome = fit(
        merged(sdsat_loss(setup.model, setup.objective), tuned),
        trainable,
        make_optimizer(cfg.optim),
        make_loader(
            data,
            cfg.data.seq_len,
            rows // count,
            cfg.run.seed,
            process_index=process,
            process_count=count,
            transform=laid,
        ),
        run=cfg.run,
        optim=cfg.optim,
        eval_loss=merged(probe_loss(setup.model, length, cfg.model.compute_dtype), tuned),
        valid=[{name: x[process::count] for name, x in batch.items()} for batch in valid],
        frozen=frozen,
        resume=resume,
        fixed=fixed_settings(cfg),
        weigh=functools.partial(weigh, setup.objective),
        measure=_measure(cfg, setup, data, tuned, placement),
        placement=placement,
    )
    params = tuned.merge(placement.host(outcome.params), frozen)
    done = export(cfg, setup, data, outcome, params) if processes.leads() else {}
    processes.wait("export")
    return done


def _placement(cfg: SDSATConfig) -> Placement:
    wanted, there = cfg.mesh.devices, jax.device_count()
    if wanted not in (0, there):
        raise InputError(
            f"mesh.devices={wanted}, but the run has {there} devices: start it where "
            "they are, or set mesh.devices=0 to take what there is"
        )
    return make_placement(cfg.mesh.fsdp, cfg.optim.batch_size)


def merged(loss: LossFn, tuned: tuning.Tuning) -> LossFn:
    """The loss as a function of what is trained."""
    return lambda trainable, frozen, batch: loss(tuned.merge(trainable, frozen), None, batch)


def _measure(
    cfg: SDSATConfig, setup: Setup, data: Prepared, tuned: tuning.Tuning, placement: Placement
):
    """Decoding figures as a function of what is trained and what is not.

    Every process decodes all prompts on one of its devices, which takes a copy of the params.
    """
    section = cfg.sdsat
    evaluated = cfg.run.eval_batches * cfg.optim.batch_size * cfg.data.seq_len
    prompts = held_out_prompts(data, section.decode_prompts, evaluated)
    decoding = Decoding(prompts, section.decode_tokens, section.probe_length or section.window)

    def measure(trainable: dict, frozen: dict) -> dict:
        params = placement.local(tuned.merge(trainable, frozen))
        return measure_decoding(setup.model, setup.insertion, decoding, params)

    return measure


def fixed_settings(cfg: SDSATConfig) -> dict:
    """What a resumed run must not change: it decides which batch comes next, or the shapes."""
    names = {
        "model": ("init_from", "train", "lora_rank"),
        "data": ("corpora", "files", "seq_len"),
        "sdsat": ("window", "ids", "distinct", "start_rate", "loss", "fim_rate"),
        "run": ("seed",),
        "optim": ("optimizer", "batch_size", "accumulate"),
    }
    values = {
        f"{s}.{key}": getattr(getattr(cfg, s), key) for s, keys in names.items() for key in keys
    }
    # As JSON gives them back.
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def export(cfg: SDSATConfig, setup: Setup, data: Prepared, outcome: Outcome, params: dict) -> dict:
    """Writes ``run.dir/export``, a Hugging Face directory with a card, once a run is done."""
    done = {"step": outcome.step, "finished": outcome.finished, "run_dir": cfg.run.dir}
    if not outcome.finished:
        return done
    target = Path(cfg.run.dir) / "export"
    save_pretrained(target, setup.model, params, setup.tokenizer.to_str(), cfg.run.export_dtype)
    for name in COPIED:
        if (setup.directory / name).exists():
            shutil.copyfile(setup.directory / name, target / name)
    if outcome.valid_loss is not None:
        done["held_out_loss"] = outcome.valid_loss
        done |= {f"held_out_{name}": value for name, value in outcome.valid_extras.items()}
    recipe = json.loads(json.dumps(cfg, default=vars))
    card = done | plan(cfg, setup, data) | {"recipe": recipe}
    write_text(target / "card.json", json.dumps(card, indent=1) + "\n")
    return done | {"export": str(target)}


def run() -> int:
    """The program; returns the exit code."""
    bad_input = (InputError, SpecjaxError)
    return run_program("train.sdsat", __doc__, SDSATConfig, main, bad_input, several=True)
