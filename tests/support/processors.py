"""transformers' logits processors for our settings."""

import torch
from transformers.generation import logits_process as hf

_SAME_NAME = ("repetition_penalty", "no_repeat_ngram_size", "exponential_decay_length_penalty")


def transformers_arguments(given: dict) -> dict:
    """The arguments of ``generate`` in transformers for settings of ours."""
    arguments = {name: given[name] for name in _SAME_NAME if name in given}
    if "bad_words" in given:
        arguments["bad_words_ids"] = [list(word) for word in given["bad_words"]]
    if "logit_bias" in given:
        arguments["sequence_bias"] = [
            [[token], bias] for token, bias in given["logit_bias"].items()
        ]
    if "suppress_tokens" in given:
        arguments["suppress_tokens"] = list(given["suppress_tokens"])
    if "min_tokens" in given:
        arguments["min_new_tokens"] = given["min_tokens"]
    return arguments


def _bias_list(given: dict) -> list:
    return [[[token], bias] for token, bias in given["logit_bias"].items()]


def transformers_list(given: dict, ends: tuple[int, ...], prompt_length: int):
    """The processors in the order in which ``generate`` of transformers makes them."""
    of = given.get
    ends = list(ends)
    made = hf.LogitsProcessorList()
    if of("logit_bias"):
        made.append(hf.SequenceBiasLogitsProcessor(_bias_list(given)))
    if of("repetition_penalty"):
        made.append(hf.RepetitionPenaltyLogitsProcessor(of("repetition_penalty")))
    if of("no_repeat_ngram_size"):
        made.append(hf.NoRepeatNGramLogitsProcessor(of("no_repeat_ngram_size")))
    if of("bad_words"):
        made.append(hf.NoBadWordsLogitsProcessor([list(word) for word in of("bad_words")]))
    if of("min_tokens"):
        made.append(hf.MinNewTokensLengthLogitsProcessor(prompt_length, of("min_tokens"), ends))
    if of("exponential_decay_length_penalty"):
        decay = of("exponential_decay_length_penalty")
        made.append(hf.ExponentialDecayLengthPenalty(decay, torch.tensor(ends), prompt_length))
    if of("suppress_tokens"):
        made.append(hf.SuppressTokensLogitsProcessor(list(of("suppress_tokens"))))
    made.append(hf.TemperatureLogitsWarper(float(of("temperature", 1.0))))
    for name, warper in (
        ("top_k", hf.TopKLogitsWarper),
        ("top_p", hf.TopPLogitsWarper),
        ("min_p", hf.MinPLogitsWarper),
        ("typical_p", hf.TypicalLogitsWarper),
        ("epsilon_cutoff", hf.EpsilonLogitsWarper),
    ):
        if of(name):
            made.append(warper(of(name)))
    if of("eta_cutoff"):
        made.append(hf.EtaLogitsWarper(epsilon=of("eta_cutoff")))
    return made
