"""Reads ``generation_config.json``: how a checkpoint's authors would decode it.

Nothing is decoded by it here: a program may take the sampling where its user gave none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax._util.checks import FLAG, FROM_0, number, require, require_all, whole
from specjax._util.errors import ModelError
from specjax._util.sampling_checks import CHECKS
from specjax.models.config import as_ids
from specjax.models.hf.config import token_ids
from specjax.models.hf.files import read_json

FILE = "generation_config.json"
# The settings that are taken where it asks for sampling. In some files top_k=-1 means that it is
# off, as in vLLM.
_SAMPLING = {
    "temperature": FROM_0,
    "top_k": whole(-1),
    "top_p": number(0, 1),
    "min_p": number(0, 1),
    "typical_p": number(0, 1, above=True),
    "epsilon_cutoff": number(0, 1, below=True),
    "eta_cutoff": number(0, 1, below=True),
}
_OFF = {"min_p": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}
_LEAST_TOP_P = 1e-9  # for 0, which leaves the likeliest token alone
# The settings that also act on greedy decoding: their names here, and the values that change
# nothing. Their checks are those of a Sampling.
_PROCESSORS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "repetition_penalty": ("repetition_penalty", (1,)),
    "presence_penalty": ("presence_penalty", (0,)),
    "frequency_penalty": ("frequency_penalty", (0,)),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", (0,)),
    "min_new_tokens": ("min_tokens", (0,)),
    "bad_words_ids": ("bad_words", ([],)),
    "suppress_tokens": ("suppress_tokens", ([],)),
    "exponential_decay_length_penalty": ("exponential_decay_length_penalty", ()),
}
# Further settings that change the text, with the values of each that change nothing.
_OTHERS: dict[str, tuple[Any, ...]] = {
    "encoder_repetition_penalty": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "min_length": (0,),
    "max_new_tokens": (),
    "stop_strings": ([], ""),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
}


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint's ``generation_config.json`` asks for; empty where there is no file.

    Attributes:
      sampling: arguments of :class:`specjax.Sampling`, as far as the file gives them. With
        ``do_sample`` true, the temperature is 1 if it gives none. With ``do_sample`` false, it is 0
        and nothing is truncated. Penalties and bans act in both.
      not_taken: other settings that would change the text, by name. Without ``do_sample``, which
        means greedy decoding in transformers, those of sampling are among them.
      eos_ids: ids that end a sequence, often more than config.json lists.
    """

    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    not_taken: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()


def read_generation_defaults(directory: Path, vocab_size: int) -> GenerationDefaults:
    """The directory's generation config.

    Raises:
      ModelError: it is no JSON object, or a value has a wrong type or is out of range.
    """
    path = directory / FILE
    settings = read_json(path)
    checks = _SAMPLING | {"eos_token_id": token_ids(vocab_size), "do_sample": FLAG}
    require_all(f"{path}: ", settings, checks, ModelError)

    given = {
        name: settings[name]
        for name in _SAMPLING
        if settings.get(name) is not None and settings[name] != _OFF.get(name)
    }
    if "top_k" in given:
        given["top_k"] = max(given["top_k"], 0)
    if "top_p" in given:
        given["top_p"] = max(given["top_p"], _LEAST_TOP_P)
    processors = {}
    for name, (ours, neutral) in _PROCESSORS.items():
        value = settings.get(name)
        if value is not None and value not in neutral:
            require(f"{path}: ", name, value, CHECKS[ours], ModelError)
            processors[ours] = value
    not_taken = {
        name: settings[name]
        for name, neutral in _OTHERS.items()
        if settings.get(name) is not None and settings[name] not in neutral
    }
    do_sample = settings.get("do_sample")
    sampling: dict[str, Any] = {}
    if do_sample:
        sampling = {"temperature": 1.0} | given
    elif do_sample is False:
        sampling = {"temperature": 0.0}
    else:
        not_taken = given | not_taken
    return GenerationDefaults(
        sampling | processors, not_taken, as_ids(settings.get("eos_token_id"))
    )
