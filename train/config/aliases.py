"""Names of keys in other trainers: those that mean the same, and what stands for the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax._util.errors import InputError

# A name of transformers, TRL, PEFT or torchtune → the key that means the same, as section.key.
SAME = {
    "model_name_or_path": "model.init_from",
    "gradient_checkpointing": "model.remat",
    "lora_r": "model.lora_rank",
    "tokenizer_name_or_path": "model.tokenizer",
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "max_seq_len": "data.seq_len",
    "block_size": "data.seq_len",
    "chat_template_path": "data.chat_template",
    "chat_template_kwargs": "data.template_args",
    "optim": "optim.optimizer",
    "max_steps": "optim.total_steps",
    "num_train_epochs": "optim.num_epochs",
    "gradient_accumulation_steps": "optim.accumulate",
    "max_grad_norm": "optim.clip_norm",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "adam_epsilon": "optim.epsilon",
    "output_dir": "run.dir",
    "logging_steps": "run.log_every",
    "eval_steps": "run.eval_every",
    "save_steps": "run.checkpoint_every",
    "save_total_limit": "run.keep",
}
# A name with another meaning than any key → what to set in its place.
DIFFERENT = {
    "per_device_train_batch_size": "optim.batch_size counts the rows of all devices",
    "per_device_eval_batch_size": "optim.batch_size is that of evaluation, too",
    "train_batch_size": "optim.batch_size counts the rows of one micro-batch",
    "lr_scheduler_type": "optim.schedule is wsd or cosine",
    "lr": "did you mean optim.learning_rate?",
    "warmup_ratio": "optim.warmup_steps counts steps",
    "bf16": "set model.compute_dtype='bfloat16'",
    "fp16": "set model.compute_dtype='bfloat16': training in float16 needs scaled losses",
    "torch_dtype": "set model.compute_dtype",
    "dtype": "set model.compute_dtype",
    "target_modules": "model.lora_matrices names them as q, k, v, out, gate, up and down",
    "lora_target_modules": "model.lora_matrices names them as q, k, v, out, gate, up and down",
    "lora_dropout": "LoRA has no dropout here",
    "packing": "rows are always packed",
    "assistant_only_loss": "data.train_on is assistant, last or all",
    "completion_only_loss": "data.train_on is assistant, last or all",
    "report_to": "set run.tensorboard or run.wandb",
    "save_strategy": "set run.checkpoint_every",
    "eval_strategy": "set run.eval_every",
    "resume_from_checkpoint": "resume with --resume",
    "fsdp_size": "did you mean mesh.fsdp?",
    "train_file": "data.files is a list of files",
    "validation_file": "data.eval is a list of files",
    "dataset_name": "data.files is a list of files, and of data sets as hf:NAME:SPLIT",
}


def renamed(section: str, values: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """A section's values under our names.

    Args:
      fields: the section's keys.

    Raises:
      InputError: a value is given under both names.
    """
    out = {}
    for name, value in values.items():
        place, _, key = SAME.get(name, "").partition(".")
        if name in fields or place != section or key not in fields:
            key = name
        if key in out or (key != name and key in values):
            raise InputError(f"{section}.{name} and {section}.{key} are the same: set one of them")
        out[key] = value
    return out


def hint(name: str, sections: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What to write instead of an unknown name; None if nothing is known of it.

    Args:
      sections: the config's keys, by section.
    """
    section, _, key = SAME.get(name, "").partition(".")
    if key in sections.get(section, ()):
        return f"did you mean {section}.{key}?"
    for section, keys in sections.items():
        if name in keys:
            return f"did you mean {section}.{name}?"
    return DIFFERENT.get(name)
