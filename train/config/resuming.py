"""What a resumed run may change, and the check that everything else is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specjax._util.errors import InputError
from specjax.lm import model_digest
from train.config.reading import to_dict

# By section. A resumed run may change how long it trains and at which rates, on which devices
# it runs, and what it reports.
MAY_CHANGE = {
    "data": ("shards",),  # where tokens are stored; the corpus digest tells whether they differ
    "model": ("remat", "scan"),
    "distill": ("decode_prompts", "decode_tokens", "decode_length"),
    "sdsat": ("probe_length", "decode_prompts", "decode_tokens"),
    # Where states are stored; the loader's state tells whether the rows differ.
    "head": ("decode_prompts", "decode_tokens", "states"),
    "optim": (
        *(
            "total_steps",
            "num_epochs",
            "learning_rate",
            "muon_learning_rate",
            "weight_decay",
            "clip_norm",
        ),
        *("schedule", "warmup_steps", "decay_fraction", "final_fraction"),
    ),
    "mesh": ("fsdp", "model", "sequence", "devices", "topology", "memory_gib"),
    "run": (
        *("dir", "log_every", "eval_every", "eval_batches", "checkpoint_every", "keep"),
        *("checkpoint_minutes", "keep_best", "patience", "sample_tokens"),
        *("export_dtype", "tensorboard", "wandb"),
    ),
}


# Keys of configs that name a model, which a run reads beside its checkpoint.
MODELS = ("model.init_from", "head.init_from", "distill.teacher")
DIGEST = "digest of "  # before the name of such a key: a setting of the model's files


def fixed_settings(program: str, cfg: Any, model: Any, corpus: str) -> dict[str, Any]:
    """The settings that a resumed run must not change, by dotted name, as JSON stores them.

    These are the program, every config key outside :data:`MAY_CHANGE`, every field of the model's
    architecture, and the digests of the corpus and of the models that :data:`MODELS` names.

    Args:
      model: the model's config, as the checkpoint and the training config decide it.
      corpus: digest of the corpus's tokens; it changes with the tokenizer and the layout, too.

    Raises:
      ModelError: a model's files cannot be read.
    """
    settings: dict[str, Any] = {"program": program}
    for section, values in to_dict(cfg).items():
        changeable = MAY_CHANGE.get(section, ())
        settings[section] = {key: x for key, x in values.items() if key not in changeable}
    settings["architecture"] = to_dict(model)
    settings["corpus"] = {"sha256": corpus}
    flat = dict(_flatten(settings))
    for key in MODELS:
        if flat.get(key):
            base = flat.get("model.base") if key == "model.init_from" else None
            flat[DIGEST + key] = model_digest(flat[key], base or None)
    return flat


def require_same(began: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises InputError if a setting differs from the one that the run began with.

    Keys that are missing in ``began`` are newer than the run and are not compared.
    """
    for name, value in began.items():
        if now.get(name) == value:
            continue
        if name.startswith(DIGEST):
            key = name.removeprefix(DIGEST)
            raise InputError(
                f"--resume: {key}={now.get(key)!r} is not the model that the run began with: "
                "its files have changed; put them back, or start a new run in another run.dir"
            )
        raise InputError(
            f"--resume: {name} is {now.get(name)!r}, the run began with {value!r}; set it "
            "back, or start a new run in another run.dir"
        )


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every leaf of nested dicts; an empty dict is a leaf."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
