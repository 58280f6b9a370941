"""Pre-training, from scratch or onward, and distillation of drafts.

python -m train.lm CONFIG.toml [--set section.key=value ...] [--resume] [--dry-run] [--json]
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
from tokenizers import Tokenizer

from specjax.errors import InputError, SpecjaxError
from specjax.files import write_text
from specjax.models import (
    ModelConfig,
    head_matrix,
    hidden_states,
    init_params,
    load_pretrained,
    num_params,
    save_pretrained,
)
from train.cli import run_program
from train.config import LMConfig, Model, Run
from train.data.corpus import load_corpus, permissive_distributions
from train.data.packing import Prepared, make_loader, prepare, valid_batches
from train.data.tokenizer import EOS_ID, load_tokenizer, train_tokenizer
from train.engine.loop import LossFn, Outcome, fit
from train.engine.losses import chunked_cross_entropy, chunked_distillation
from train.engine.optim import make_optimizer


def data_loss(cfg: ModelConfig) -> LossFn:
    """Cross-entropy of the next token, summed, and the number of tokens."""

    def loss(params, frozen, batch):
        hidden = _hidden(cfg, params, batch)
        return chunked_cross_entropy(hidden, head_matrix(cfg, params), batch["labels"])

    return loss


def distillation_loss(
    cfg: ModelConfig, teacher: ModelConfig, alpha: float, temperature: float
) -> LossFn:
    """The draft's loss; ``frozen`` are the teacher's params."""

    def loss(params, frozen, batch):
        return chunked_distillation(
            _hidden(cfg, params, batch),
            head_matrix(cfg, params),
            jax.lax.stop_gradient(_hidden(teacher, frozen, batch)),
            head_matrix(teacher, frozen),
            batch["labels"],
            alpha,
            temperature,
        )

    return loss


def _hidden(cfg: ModelConfig, params: dict, batch: dict) -> jax.Array:
    return hidden_states(cfg, params, batch["tokens"], batch["positions"], batch["segments"])


def build_model(cfg: LMConfig, vocab_size: int) -> tuple[ModelConfig, Callable[[], dict]]:
    """The architecture, and a function that makes its first params."""
    if cfg.model.init_from:
        model, params = load_pretrained(cfg.model.init_from)
        _check_fit(cfg, model, vocab_size)
        return model, lambda: params
    model = _new_model(cfg.model, vocab_size)
    _check_fit(cfg, model, vocab_size)
    return model, lambda: init_params(model, jax.random.key(cfg.run.seed))


def _check_fit(cfg: LMConfig, model: ModelConfig, vocab_size: int) -> None:
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


def _new_model(section: Model, vocab_size: int) -> ModelConfig:
    return ModelConfig.llama(
        vocab_size=vocab_size,
        hidden_size=section.hidden_size,
        num_layers=section.num_layers,
        num_heads=section.num_heads,
        num_kv_heads=section.num_kv_heads or None,
        intermediate_size=section.intermediate_size,
        max_position=section.max_position,
        rope_theta=section.rope_theta,
        tie_embeddings=section.tie_embeddings,
        eos_ids=(EOS_ID,),
        bos_id=EOS_ID,
    )


def get_tokenizer(cfg: LMConfig, documents: list, directory: Path) -> Tokenizer:
    """The configured tokenizer, or one trained on the corpus and kept in the run."""
    if cfg.tokenizer.path:
        return load_tokenizer(cfg.tokenizer.path)
    own = directory / "tokenizer.json"
    if own.exists():
        return load_tokenizer(own)
    return train_tokenizer(documents, cfg.tokenizer.vocab_size, own)


def plan(cfg: LMConfig, model: ModelConfig, data: Prepared) -> dict:
    """What the run will do, in numbers; memory counts params, gradients and two moments."""
    tokens = cfg.optim.batch_size * cfg.optim.accumulate * cfg.data.seq_len
    return {
        "parameters": num_params(model),
        "vocab_size": model.vocab_size,
        "train_tokens": len(data.train),
        "held_out_tokens": data.valid_tokens,
        "tokens_per_step": tokens,
        "steps": cfg.optim.total_steps,
        "epochs": round(tokens * cfg.optim.total_steps / max(1, len(data.train)), 2),
        "state_megabytes": round(16 * num_params(model) / 1e6, 1),
    }


def check_directory(run: Run, resume: bool) -> Path:
    """The run's directory; one that holds a run is only gone on with, never overwritten."""
    directory = Path(run.dir)
    if (directory / "metrics.jsonl").exists() and not resume:
        raise InputError(
            f"run.dir={run.dir!r} holds a run: go on with --resume, or choose "
            "another directory with --set run.dir=…"
        )
    return directory


def make_directory(directory: Path) -> None:
    """Makes the run's directory.

    Raises:
      InputError: it cannot be made; the reason is the system's.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"run.dir={str(directory)!r}: {error.strerror}") from None


def main(cfg: LMConfig, resume: bool, dry_run: bool) -> dict:
    """Trains as the config says; returns the summary that ``--json`` prints."""
    directory = check_directory(cfg.run, resume or dry_run)
    documents = load_corpus(cfg.data.corpora, cfg.data.files)
    if dry_run:
        with tempfile.TemporaryDirectory() as scratch:
            tokenizer = get_tokenizer(cfg, documents, Path(scratch))
        data = prepare(documents, tokenizer)
        return plan(cfg, build_model(cfg, tokenizer.get_vocab_size())[0], data)
    make_directory(directory)
    tokenizer = get_tokenizer(cfg, documents, directory)
    data = prepare(documents, tokenizer, directory.parent / "cache")
    model, first_params = build_model(cfg, tokenizer.get_vocab_size())
    summary = plan(cfg, model, data)
    loss, frozen = data_loss(model), None
    if cfg.distill.teacher:
        teacher, frozen = load_pretrained(cfg.distill.teacher)
        if teacher.vocab_size != model.vocab_size:
            raise InputError(
                f"distill.teacher={cfg.distill.teacher!r} has {teacher.vocab_size} "
                f"ids, the draft {model.vocab_size}: share the tokenizer"
            )
        loss = distillation_loss(model, teacher, cfg.distill.alpha, cfg.distill.temperature)
    rows = cfg.optim.batch_size
    outcome = fit(
        loss,
        first_params(),
        make_optimizer(cfg.optim),
        make_loader(data, cfg.data.seq_len, rows, cfg.run.seed),
        run=cfg.run,
        optim=cfg.optim,
        eval_loss=data_loss(model),
        valid=valid_batches(data, cfg.data.seq_len, rows, cfg.run.eval_batches),
        frozen=frozen,
        resume=resume,
        fixed=fixed_settings(cfg),
    )
    return summary | export(cfg, model, tokenizer, data, outcome)


def fixed_settings(cfg: LMConfig) -> dict:
    """What a resumed run must not change: it decides which batch comes next, or the shapes."""
    optim = cfg.optim
    return {
        "data.corpora": list(cfg.data.corpora),
        "data.files": list(cfg.data.files),
        "data.seq_len": cfg.data.seq_len,
        "run.seed": cfg.run.seed,
        "optim.optimizer": optim.optimizer,
        "optim.batch_size": optim.batch_size,
        "optim.accumulate": optim.accumulate,
    }


def export(
    cfg: LMConfig, model: ModelConfig, tokenizer: Tokenizer, data: Prepared, outcome: Outcome
) -> dict:
    """Writes ``run.dir/export``, a Hugging Face directory with a card, once a run is done."""
    done = {"step": outcome.step, "finished": outcome.finished, "run_dir": cfg.run.dir}
    if not outcome.finished:
        return done
    target = Path(cfg.run.dir) / "export"
    save_pretrained(target, model, outcome.params, tokenizer.to_str(), cfg.run.export_dtype)
    if outcome.valid_loss is not None:
        done["held_out_loss"] = outcome.valid_loss
        # Nats per token, over bytes per token, in bits.
        bits = outcome.valid_loss * data.valid_tokens / data.valid_bytes / math.log(2)
        done["held_out_bits_per_byte"] = bits
    card = done | plan(cfg, model, data) | {"recipe": json.loads(json.dumps(cfg, default=vars))}
    if "installed" in cfg.data.corpora:
        card["installed_packages"] = permissive_distributions()
    write_text(target / "card.json", json.dumps(card, indent=1) + "\n")
    return done | {"export": str(target)}


def run() -> int:
    """The program; returns the exit code."""
    return run_program("train.lm", __doc__, LMConfig, main, (InputError, SpecjaxError))
