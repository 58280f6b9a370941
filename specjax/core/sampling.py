"""How tokens are drawn: what a user asks for, and the same as arrays.

:class:`Sampling` has the names of vLLM and transformers. docs/sampling.md has every setting's
formula, its source, and the order in which they act.

Axis legend: B rows, K ids of a list, W banned words, L tokens of a word.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from specjax._util.arguments import validate_fields
from specjax._util.errors import OptionError
from specjax._util.sampling_checks import CHECKS
from specjax.core.types import NO_TOKEN, Cutoffs, Inputs, PathSettings, Warp

LEAST = 1e-30  # smallest top_p: far below, float32 makes it 0, which would keep no token
# Lists of ids are padded to these lengths, so that usual requests share a program. A longer list is
# padded to GROWTH times as many, or GROWTH² times, and compiles once. These are far apart, because
# the clients of a server choose the lengths, and each combination has programs of its own.
USUAL_BIASES = 512
USUAL_STOP_IDS = 16
USUAL_WORDS = 16
USUAL_WORD_LENGTH = 8
GROWTH = 16

_CUTOFFS = ("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_n_sigma")
_WARP = ("temperature", "top_k", "top_p")
TRUNCATION = ("top_k", "top_p", *_CUTOFFS)  # what has no effect on greedy decoding


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Every value left out changes nothing.

    All of it is part of the target distribution. So a lossless rule stays lossless, and drafts
    follow the same settings.

    Attributes:
      temperature: at least 0; 0 is greedy.
      top_k: keep so many of the likeliest tokens; 0 is off.
      top_p: keep the likeliest tokens up to this mass, above 0 and up to 1.
      min_p: keep tokens with at least this share of the likeliest one's probability, 0 to 1.
      typical_p: keep the tokens whose surprise is closest to the entropy, up to this mass.
      epsilon_cutoff: keep tokens of at least this probability, from 0 and below 1.
      eta_cutoff: as epsilon_cutoff, but less where the entropy is high, from 0 and below 1.
      top_n_sigma: keep logits within so many standard deviations of the largest; 0 is off.
      repetition_penalty: of tokens in the prompt or the output, above 0; 1 is off.
      presence_penalty, frequency_penalty: subtracted for tokens of the output; the second for each
        time.
      no_repeat_ngram_size: n-grams of this length may occur once; 0 is off.
      dry_multiplier, dry_base, dry_allowed_length, dry_sequence_breakers: the DRY penalty of
        tokens that continue a repetition; a multiplier of 0 is off. Breakers are token ids.
      bad_words: token sequences that may not be written.
      logit_bias: what is added to tokens' logits, by id.
      allowed_token_ids: the only tokens; None allows all.
      suppress_tokens: tokens that may not be written.
      min_tokens: no end of sequence before so many new tokens.
      ignore_eos: go on after the model's end of sequence, to the budget.
      stop_token_ids: further tokens that end a row.
      exponential_decay_length_penalty: ``(start, factor)``: after ``start`` new tokens the logit of
        the end of sequence grows by ``|logit| · (factor^n − 1)``.
      grammar: what the new text must be: ``json``, ``schema:SCHEMA``, ``regex:EXPRESSION`` or
        ``lark:GRAMMAR`` (:mod:`specjax.text.grammar`); empty is off.

    Raises:
      OptionError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    top_n_sigma: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_sequence_breakers: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: Any = ()
    allowed_token_ids: tuple[int, ...] | None = None
    suppress_tokens: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    exponential_decay_length_penalty: tuple[int, float] | None = None
    grammar: str = ""

    def __post_init__(self):
        validate_fields(self, **CHECKS)

    @property
    def has_cutoffs(self) -> bool:
        """Whether it truncates by more than top-k and top-p."""
        return self._differs(_CUTOFFS)

    @property
    def path_settings(self) -> tuple[str, ...]:
        """The settings in use that need a row's tokens, its own logit biases or its own ends."""
        others = (
            name for name in CHECKS if name not in (*_CUTOFFS, *_WARP, *_DRY_DETAILS, "grammar")
        )
        return tuple(name for name in others if self._differs((name,)))

    @property
    def kinds(self) -> frozenset[str]:
        """The optional parts of a compiled program that the settings need, without grammars.

        They are cutoffs, path settings, and longer lists in these than usual. A request that joins
        a running batch compiles nothing if the batch has had these parts before.
        """
        sizes = _PathSizes().at_least_for([self]) if self.path_settings else None
        return _kinds(self.has_cutoffs, sizes)

    @property
    def as_given(self) -> dict[str, Any]:
        """Temperature, top-k, top-p, and every other setting that is not at its default."""
        others = (name for name in CHECKS if name not in _WARP and self._differs((name,)))
        return {name: getattr(self, name) for name in (*_WARP, *others)}

    def _differs(self, names: Iterable[str]) -> bool:
        return any(getattr(self, name) != getattr(_DEFAULT, name) for name in names)

    def check_vocabulary(self, vocab: int) -> None:
        """Refuses token ids that the model does not have.

        Raises:
          OptionError: names the setting and the id.
        """
        ids = {
            "logit_bias": [token for token, _ in self.logit_bias],
            "bad_words": [token for word in self.bad_words for token in word],
        }
        for name in ("allowed_token_ids", "suppress_tokens", "stop_token_ids"):
            ids[name] = getattr(self, name) or ()
        for name, tokens in ids.items():
            beyond = max(tokens, default=0)
            if beyond >= vocab:
                raise OptionError(
                    f"{name}: token id {beyond} is beyond the vocabulary; ids go from 0 to "
                    f"{vocab - 1}"
                )

    def arrays(self, batch: int) -> Warp:
        """The settings as arrays for ``batch`` rows."""
        return stacked([self] * batch)


_DRY_DETAILS = ("dry_base", "dry_allowed_length", "dry_sequence_breakers")  # off by the multiplier
_DEFAULT = Sampling()


def stacked(rows: Sequence[Sampling], like: Warp | None = None) -> Warp:
    """The settings of each row as arrays.

    What no row uses is None, and costs nothing. What ``like`` has is there in any case, and lists
    are at least as long as there, so that both have the same program.
    """
    cutoffs = None
    if any(row.has_cutoffs for row in rows) or (like and like.cutoffs):
        cutoffs = Cutoffs(**{name: _floats(rows, name) for name in _CUTOFFS})
    path = None
    if any(row.path_settings for row in rows) or (like and like.path):
        least = _PathSizes.of(like.path) if like and like.path else _PathSizes()
        path = _path_settings(rows, least)
    return Warp(
        jnp.array([row.temperature for row in rows], jnp.float32),
        jnp.array([row.top_k for row in rows], jnp.int32),
        jnp.array([max(row.top_p, LEAST) for row in rows], jnp.float32),
        cutoffs,
        path,
    )


def kinds_of(warp: Warp) -> frozenset[str]:
    """What :attr:`Sampling.kinds` is of one request, for the settings of a batch."""
    sizes = None if warp.path is None else _PathSizes.of(warp.path)
    return _kinds(warp.cutoffs is not None, sizes)


def with_path_settings(inputs: Inputs) -> Inputs:
    """Inputs of rows that have no settings of paths, with arrays for them that change nothing."""
    rows = [_DEFAULT] * inputs.warp.temperature.shape[0]
    return inputs.replace(warp=inputs.warp.replace(path=_path_settings(rows, _PathSizes())))


class _PathSizes(NamedTuple):
    """The lengths of the lists in path settings: the usual ones, unless others are given."""

    biases: int = USUAL_BIASES
    words: int = USUAL_WORDS
    word_length: int = USUAL_WORD_LENGTH
    breakers: int = USUAL_STOP_IDS
    stop_ids: int = USUAL_STOP_IDS

    @classmethod
    def of(cls, path: PathSettings) -> _PathSizes:
        """Those of settings that are arrays."""
        _, words, word_length = path.bad_words.shape
        breakers = path.dry_breakers.shape[1]
        stop_ids = path.stop_ids.shape[1]
        return cls(path.bias_ids.shape[1], words, word_length, breakers, stop_ids)

    def at_least_for(self, rows: Sequence[Sampling]) -> _PathSizes:
        """These sizes, or larger ones if a row needs them."""
        needs = [
            max(len(_all_biases(row)) for row in rows),
            max(len(row.bad_words) for row in rows),
            max((len(word) for row in rows for word in row.bad_words), default=0),
            max(len(row.dry_sequence_breakers) for row in rows),
            max(len(row.stop_token_ids) for row in rows),
        ]
        return _PathSizes(*map(_size, needs, self))


def _kinds(has_cutoffs: bool, sizes: _PathSizes | None) -> frozenset[str]:
    kinds = {"cutoffs"} if has_cutoffs else set()
    if sizes is not None:
        kinds.add("path")
        for name, size, usual in zip(sizes._fields, sizes, _PathSizes(), strict=True):
            if size > usual:
                kinds.add(f"{name}: {size}")
    return frozenset(kinds)


def _path_settings(rows: Sequence[Sampling], least: _PathSizes) -> PathSettings:
    sizes = least.at_least_for(rows)
    biases = [_all_biases(row) for row in rows]
    words = _padded([row.bad_words for row in rows], (), sizes.words)
    length = sizes.word_length
    # Words end at the last place, where the banned token is.
    aligned = [[(NO_TOKEN,) * (length - len(word)) + word for word in row] for row in words]
    decays = [row.exponential_decay_length_penalty or (0, 1.0) for row in rows]
    breakers = [row.dry_sequence_breakers for row in rows]
    return PathSettings(
        repetition_penalty=_floats(rows, "repetition_penalty"),
        presence_penalty=_floats(rows, "presence_penalty"),
        frequency_penalty=_floats(rows, "frequency_penalty"),
        no_repeat_ngram_size=_whole_numbers(rows, "no_repeat_ngram_size"),
        dry_multiplier=_floats(rows, "dry_multiplier"),
        dry_base=_floats(rows, "dry_base"),
        dry_allowed_length=_whole_numbers(rows, "dry_allowed_length"),
        dry_breakers=jnp.asarray(_padded(breakers, NO_TOKEN, sizes.breakers), jnp.int32),
        bad_words=jnp.asarray(np.array(aligned, np.int32)),
        bias_ids=_column(biases, 0, NO_TOKEN, jnp.int32, sizes.biases),
        biases=_column(biases, 1, 0.0, jnp.float32, sizes.biases),
        only_biased=jnp.array([row.allowed_token_ids is not None for row in rows]),
        min_tokens=_whole_numbers(rows, "min_tokens"),
        ignore_eos=jnp.array([row.ignore_eos for row in rows]),
        stop_ids=jnp.asarray(
            _padded([row.stop_token_ids for row in rows], NO_TOKEN, sizes.stop_ids), jnp.int32
        ),
        decay_start=jnp.array([start for start, _ in decays], jnp.int32),
        decay_factor=jnp.array([factor for _, factor in decays], jnp.float32),
    )


def _all_biases(row: Sampling) -> list[tuple[int, float]]:
    """What is added to logits by id: biases, −inf for a ban, 0 for a token that is allowed."""
    bias = dict(row.logit_bias)
    if row.allowed_token_ids is not None:
        bias = {token: bias.get(token, 0.0) for token in row.allowed_token_ids}
    bias |= dict.fromkeys(row.suppress_tokens, float("-inf"))
    return list(bias.items())


def _column(rows: Sequence[Sequence[tuple]], index: int, fill: Any, dtype: Any, size: int):
    values = [[pair[index] for pair in row] for row in rows]
    return jnp.asarray(np.array(_padded(values, fill, size)), dtype)


def _padded(rows: Sequence[Sequence[Any]], fill: Any, size: int) -> list[list[Any]]:
    """Rows of one length."""
    return [[*row, *[fill] * (size - len(row))] for row in rows]


def _size(longest: int, usual: int) -> int:
    """``usual``, times a power of ``GROWTH`` if ``longest`` is more."""
    size = usual
    while size < longest:
        size *= GROWTH
    return size


def _floats(rows: Sequence[Sampling], name: str):
    return jnp.array([getattr(row, name) for row in rows], jnp.float32)


def _whole_numbers(rows: Sequence[Sampling], name: str) -> Int[jnp.ndarray, "B"]:
    return jnp.array([getattr(row, name) for row in rows], jnp.int32)
