"""Keys of a config that have no effect beside another key's value, as one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class NoEffect(NamedTuple):
    """``keys`` have no effect if ``holds(the value of key)``; names are section.key."""

    keys: tuple[str, ...]
    key: str
    holds: Callable[[Any], bool]


_SIZES = (
    *("model.hidden_size", "model.num_layers", "model.num_heads", "model.num_kv_heads"),
    *("model.intermediate_size", "model.max_position", "model.rope_theta"),
    "model.tie_embeddings",
)
_LOW_RANK = ("model.lora_rank", "model.lora_alpha", "model.lora_matrices")


def _is_empty(value: Any) -> bool:
    return not value


RULES = (
    NoEffect((*_SIZES, "tokenizer.vocab_size", "tokenizer.eos"), "model.init_from", bool),
    NoEffect(("tokenizer.vocab_size",), "tokenizer.path", bool),
    NoEffect(("distill.alpha", "distill.temperature"), "distill.teacher", _is_empty),
    NoEffect(("distill.decode_prompts",), "distill.teacher", _is_empty),
    NoEffect(
        ("distill.decode_tokens", "distill.decode_length"), "distill.decode_prompts", _is_empty
    ),
    NoEffect(("distill.temperature",), "distill.alpha", _is_empty),
    NoEffect(("optim.total_steps",), "optim.num_epochs", bool),
    NoEffect(
        ("optim.muon_learning_rate", "optim.muon_momentum"),
        "optim.optimizer",
        lambda name: name != "muon",
    ),
    NoEffect(("optim.epsilon",), "optim.optimizer", lambda name: name == "adafactor"),
    NoEffect(
        ("optim.moments", "optim.beta1", "optim.beta2"),
        "optim.optimizer",
        lambda name: name == "adafactor",
    ),
    NoEffect(("optim.decay_fraction",), "optim.schedule", lambda name: name != "wsd"),
    NoEffect(_LOW_RANK, "model.train", lambda name: name not in ("lora", "gated-lora")),
    NoEffect(("sdsat.weight",), "sdsat.loss", lambda name: name == "basic"),
    NoEffect(("sdsat.mix",), "sdsat.adaptive_targets", lambda name: name != "mix"),
    NoEffect(("sdsat.decode_tokens",), "sdsat.decode_prompts", _is_empty),
    NoEffect(("head.drop_outside",), "head.draft_vocab", _is_empty),
    NoEffect(("head.decay",), "head.steps", lambda steps: steps == 1),
    NoEffect(("head.decode_tokens",), "head.decode_prompts", _is_empty),
    NoEffect(("head.decode_prompts", "head.decode_tokens"), "head.states", bool),
    NoEffect(("run.eval_every", "run.sample_tokens"), "run.eval_batches", _is_empty),
    NoEffect(
        ("distill.decode_prompts", "distill.decode_tokens", "distill.decode_length"),
        "run.eval_batches",
        _is_empty,
    ),
    NoEffect(
        ("sdsat.decode_prompts", "sdsat.decode_tokens", "sdsat.probe_length"),
        "run.eval_batches",
        _is_empty,
    ),
    NoEffect(("head.decode_prompts", "head.decode_tokens"), "run.eval_batches", _is_empty),
)
# Keys that one program alone reads: its name, and a section that only its config has.
OF_ONE_PROGRAM = {
    "run.sample_tokens": ("train.lm", "distill"),
    "mesh.memory_gib": ("train.sdsat", "sdsat"),
    "mesh.topology": ("train.sdsat", "sdsat"),
}


def keys_without_effect(cfg: Any, given: dict[str, Any]) -> list[str]:
    """One line for each rule that holds for a key that is given.

    Args:
      given: the values of the config's file and overrides, section by section, under our names.
    """
    lines = []
    for key, (program, section) in OF_ONE_PROGRAM.items():
        if _is_given(key, given) and not hasattr(cfg, section):
            lines.append(f"{key} has no effect: only {program} reads it")
    for rule in RULES:
        keys = [key for key in rule.keys if _is_given(key, given)]
        section, name = rule.key.split(".")
        if not keys or not hasattr(getattr(cfg, section, None), name):
            continue
        value = getattr(getattr(cfg, section), name)
        if rule.holds(value):
            beside = f"with {rule.key}={value!r}" if value != "" else f"without {rule.key}"
            verb = "has" if len(keys) == 1 else "have"
            lines.append(f"{', '.join(keys)} {verb} no effect {beside}")
    return lines


def _is_given(key: str, given: dict[str, Any]) -> bool:
    """Whether a value is given. A number of 0 turns something off: nothing is missed of it."""
    section, name = key.split(".")
    value = given.get(section, {}).get(name)
    return value is not None and not (type(value) is int and value == 0)
