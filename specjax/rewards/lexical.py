"""Rewards for words: ``lexical`` (words that must occur) and ``forbidden`` (words that must not).

**The rule.** A word occurs if one of its forms is in the completion, between word boundaries. The
bytes before and after must not be an ASCII letter, a digit, an underscore or a part of a
multi-byte character. The two ends of the completion are boundaries. Letters match in either case.
The forms of a ``lexical`` word are the word and its inflections (:func:`inflections`).
``=word`` is that exact spelling, for identifiers. Bytes of the text are compared, so the
tokenization does not matter.

On the device this is the Shift-And algorithm (Baeza-Yates and Gonnet 1992). Bit i of a form's state
says that its first i + 1 bytes match the last bytes of the text. One shift and one mask per byte
update all bits.

Axis legend: F forms, C words, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import warnings
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax._util.arguments import TEXTS, validate_fields
from specjax._util.errors import OptionError
from specjax.rewards.protocol import DeviceReward, RewardWarning
from specjax.text.incremental_decoder import REPLACEMENT
from specjax.text.tokenizer import Tokenizer

MAX_FORM_BYTES = 32  # the bits of a uint32
MAX_WORDS = 1000  # of a row: each form has a kilobyte of masks
MAX_TABLE_BYTES = 1 << 32  # of the table of all tokens' bytes, padded to the longest token
VOWELS = "aeiou"
WORD = rb"[0-9A-Za-z_\x80-\xff]"  # a byte that is part of a word
# Arrays grow in steps of so many forms and words, so that jobs of similar size share a program.
FORMS_STEP = 16
WORDS_STEP = 4


def inflections(word: str) -> list[str]:
    """The word and its inflections: plural, third person, past, participle, comparison.

    They are the :func:`regular_inflections`, and those that lemminflect's word list has, such as
    ``ran`` of ``run``. Without lemminflect (the extra ``words``) they are the regular ones alone.
    """
    known = _known_inflections(word.lower()) if word.isalpha() else ()
    return list(dict.fromkeys([*regular_inflections(word), *known]))


def knows_irregular_forms() -> bool:
    """Whether lemminflect is installed."""
    return importlib.util.find_spec("lemminflect") is not None


@functools.lru_cache(maxsize=4096)
def _known_inflections(word: str) -> tuple[str, ...]:
    """The word's forms in lemminflect's word list, as a verb, noun or adjective."""
    if not knows_irregular_forms():
        return ()
    import lemminflect

    by_tag = lemminflect.getAllInflections(word)
    return tuple(form for forms in by_tag.values() for form in forms)


def regular_inflections(word: str) -> list[str]:
    """The word and what the spelling rules of English make of it.

    - ``-s``, and ``-es`` after s, x, z, ch, sh and o.
    - ``-ies`` and ``-ied`` in place of y after a consonant.
    - ``-ed`` and ``-ing``, with a final e dropped, or the final consonant doubled after a single
      vowel.
    """
    if not re.fullmatch("[A-Za-z]{2,}", word):
        return [word]
    forms = [word, word + "s"]
    last = word[-1].lower()
    before = word[-2].lower()
    if re.search("(?i:s|x|z|ch|sh|o)$", word):
        forms.append(word + "es")
    if last == "y" and before not in VOWELS:
        forms += [word[:-1] + "ies", word[:-1] + "ied"]
    if last == "e":
        forms += [word + "d", word[:-1] + "ing"]
    else:
        forms += [word + "ed", word + "ing"]
    after_single_vowel = len(word) > 2 and before in VOWELS and word[-3].lower() not in VOWELS
    if after_single_vowel and last not in VOWELS + "wxy":
        forms += [word + last + "ed", word + last + "ing"]
    return forms


def forms_of(word: str, inflect: bool) -> tuple[list[str], bool]:
    """The forms that count as ``word``, and whether case matters."""
    if word.startswith("="):
        return [word[1:]], True
    if inflect:
        return inflections(word), False
    return [word], False


@dataclasses.dataclass(frozen=True)
class ShiftAnd:
    """The fraction of words that occur, by Shift-And over the bytes of each token.

    With ``absent`` it is the fraction of words that do *not* occur. ``shared`` is from
    :func:`_shared`, ``own`` from :meth:`Lexical._own`.
    """

    absent: bool = False

    def init(self, shared, own):
        bits = jnp.zeros(own["final"].shape, jnp.uint32)
        occurred = jnp.zeros(own["wanted"].shape, bool)
        return {"bits": bits, "boundary": jnp.bool_(True), "occurred": occurred}

    def advance(self, shared, own, carry, token):
        spelled = shared["bytes"][token]

        def push(i, carry):
            byte = spelled[i].astype(jnp.int32)
            boundary = ~shared["word"][byte]
            # A form that the byte before completed counts only if this byte is a boundary.
            ended = boundary & ((carry["bits"] & own["final"]) > 0)
            occurred = carry["occurred"] | jnp.any(ended[:, None] & own["owner"], axis=0)
            # A form can begin here only if the byte before was a boundary.
            begun = jnp.where(carry["boundary"], jnp.uint32(1), jnp.uint32(0))
            bits = ((carry["bits"] << 1) | begun) & own["masks"][:, byte]
            return {"bits": bits, "boundary": boundary, "occurred": occurred}

        return jax.lax.fori_loop(0, shared["count"][token], push, carry)

    def value(self, shared, own, carry):
        # The end of the completion is a boundary, too.
        last = (carry["bits"] & own["final"]) > 0
        occurred = carry["occurred"] | jnp.any(last[:, None] & own["owner"], axis=0)
        wanted = own["wanted"].sum()
        share = (occurred & own["wanted"]).sum() / jnp.maximum(wanted, 1).astype(jnp.float32)
        # Without words nothing is missing, so the reward is 1 in both cases.
        share = jnp.where(wanted > 0, share, jnp.float32(0 if self.absent else 1))
        return 1 - share if self.absent else share


@dataclasses.dataclass(frozen=True)
class Lexical:
    """The fraction of the required words that occur; the module's docstring has the rule.

    ``words`` are required in every row. A row's constraints under ``lexical`` are further ones.
    """

    words: tuple[str, ...] = ()
    name = "lexical"
    bounds = (0.0, 1.0)
    full = 1.0
    inflect = True
    absent = False

    def __post_init__(self):
        validate_fields(self, words=TEXTS)

    def words_of(self, constraints: dict) -> list[str]:
        """The words of a row, without duplicates."""
        return list(dict.fromkeys([*self.words, *constraints.get(self.name, ())]))

    def check(self, tokenizer, constraints):
        """Checks that each row has words, and that they are no more and no other than fit."""
        for row_constraints in constraints:
            words = self.words_of(row_constraints)
            if not words:
                raise OptionError(
                    f"reward {self.name}: there are no words to find; give "
                    f"--reward {self.name}:WORD,WORD or --task"
                )
            if len(words) > MAX_WORDS:
                raise OptionError(
                    f"reward {self.name}: {len(words)} words for a row; at most {MAX_WORDS} fit"
                )
            for word in words:
                _check_word(self.name, word, self.inflect, tokenizer)
        self.warn_of_regular_forms(constraints)

    def warn_of_regular_forms(self, constraints: Sequence[dict]) -> None:
        """Warns if a word is inflected without lemminflect, because fewer forms count then."""
        if not self.inflect or knows_irregular_forms():
            return
        words = [word for row in constraints for word in self.words_of(row)]
        if all(word.startswith("=") for word in words):
            return
        warnings.warn(
            f"reward {self.name}: only regular inflections count, 'ran' is no form of 'run'; for "
            'irregular ones: pip install "specjax[words]"',
            RewardWarning,
            stacklevel=2,
        )

    def score(self, sample):
        """The share of the words that occur, or that do not, float32."""
        words = self.words_of(sample.constraints)
        text = sample.text.encode()
        count = 0
        for word in words:
            count += any(pattern.search(text) for pattern in _patterns(word, self.inflect))
        # float32, as on the device: a threshold must give the same answer in both places.
        share = np.float32(count) / np.float32(len(words))
        return float(np.float32(1) - share if self.absent else share)

    def on_device(self, tokenizer, constraints):
        """An automaton of the words for each row; None without a tokenizer."""
        if tokenizer is None:
            return None
        rows = [self.words_of(one) for one in constraints]
        return DeviceReward(ShiftAnd(self.absent), _shared(tokenizer), self._own(rows))

    def _own(self, rows: list[list[str]]) -> dict[str, np.ndarray]:
        """The arrays of each row's forms, with a leading axis of rows, padded to one size.

        - ``masks`` uint32 ``[F, 256]``: bit i is set if byte i of the form may be that byte.
        - ``final`` uint32 ``[F]``: the bit of the form's last byte.
        - ``owner`` bool ``[F, C]``: the word that a form belongs to.
        - ``wanted`` bool ``[C]``: False for padding.
        """
        forms = [list(_bytes_of_forms(words, self.inflect)) for words in rows]
        num_forms = _round_up(max(map(len, forms)), FORMS_STEP)
        num_words = _round_up(max(map(len, rows)), WORDS_STEP)
        counts = np.array([len(words) for words in rows])
        masks = np.zeros((len(rows), num_forms, 256), np.uint32)
        final = np.zeros((len(rows), num_forms), np.uint32)
        owner = np.zeros((len(rows), num_forms, num_words), bool)
        for row, row_forms in enumerate(forms):
            for i, (word, form, exact) in enumerate(row_forms):
                for bit, byte in enumerate(form):
                    alternatives = {byte} if exact else _cases(byte)
                    for alternative in alternatives:
                        masks[row, i, alternative] |= np.uint32(1 << bit)
                final[row, i] = np.uint32(1 << (len(form) - 1))
                owner[row, i, word] = True
        wanted = np.arange(num_words) < counts[:, None]
        return {"masks": masks, "final": final, "owner": owner, "wanted": wanted}


@dataclasses.dataclass(frozen=True)
class Forbidden(Lexical):
    """The fraction of the forbidden words that do not occur; words are not inflected."""

    name = "forbidden"
    inflect = False
    absent = True


def _check_word(reward: str, word: str, inflect: bool, tokenizer: Tokenizer | None) -> None:
    """Refuses a word that can never be found.

    Raises:
      OptionError: it is empty, too long, or not in the tokenizer's alphabet.
    """
    forms, _ = forms_of(word, inflect)
    if not forms[0].strip():
        raise OptionError(f"reward {reward}: word {word!r} is empty; give at least one letter")
    size = max(len(form.encode(errors="replace")) for form in forms)
    if size > MAX_FORM_BYTES:
        raise OptionError(
            f"reward {reward}: {word!r} has forms of {size} bytes; at most {MAX_FORM_BYTES} can be "
            "matched"
        )
    if tokenizer is None:
        raise OptionError(f"reward {reward} reads text: it needs a target with a tokenizer")
    try:
        decoded = tokenizer.decode(tokenizer.encode(forms[0], False))
    except OptionError:  # half of a surrogate pair
        decoded = REPLACEMENT
    if forms[0] not in decoded:
        raise OptionError(
            f"reward {reward}: the target's tokenizer cannot encode {forms[0]!r} "
            f"(it reads back as {decoded!r}); leave the word out"
        )


def _bytes_of_forms(words: Sequence[str], inflect: bool) -> Iterator[tuple[int, bytes, bool]]:
    """Every form of every word: (number of the word, bytes of the form, whether case matters)."""
    for i, word in enumerate(words):
        forms, exact = forms_of(word, inflect)
        for form in dict.fromkeys(forms):
            yield i, form.encode(), exact


def _patterns(word: str, inflect: bool) -> Iterator[re.Pattern]:
    """For each form of a word, the pattern that finds it between word boundaries."""
    for _, form, exact in _bytes_of_forms([word], inflect):
        flags = 0 if exact else re.IGNORECASE
        yield re.compile(b"(?<!%b)%b(?!%b)" % (WORD, re.escape(form), WORD), flags)


def _cases(byte: int) -> set[int]:
    """The lower and the upper case of an ASCII letter; other bytes have only themselves."""
    if byte >= 128:
        return {byte}
    return {ord(chr(byte).lower()), ord(chr(byte).upper())}


@functools.lru_cache(maxsize=4)
def _shared(tokenizer: Tokenizer) -> dict[str, jax.Array]:
    """Tables over ids and bytes. Cached: every batch asks, and a large vocabulary takes a second.

    - ``bytes`` uint8 ``[V, longest]``: the bytes that each token adds to the text.
    - ``count`` int32 ``[V]``: how many bytes that is.
    - ``word`` bool ``[256]``: whether a byte is part of a word.

    Raises:
      OptionError: a token is so long that the table would not fit in memory.
    """
    token_bytes = tokenizer.token_bytes()
    longest = max(1, *map(len, token_bytes))
    if len(token_bytes) * longest > MAX_TABLE_BYTES:
        raise OptionError(
            f"rewards of words: the target's longest token has {longest} bytes, which makes a "
            "table over its vocabulary too large"
        )
    table = np.zeros((len(token_bytes), longest), np.uint8)
    for i, text in enumerate(token_bytes):
        table[i, : len(text)] = np.frombuffer(text, np.uint8)
    is_word = np.array([re.match(WORD, bytes([byte])) is not None for byte in range(256)])
    count = np.array([len(text) for text in token_bytes], np.int32)
    return {"bytes": jnp.asarray(table), "count": jnp.asarray(count), "word": jnp.asarray(is_word)}


def _round_up(size: int, step: int) -> int:
    """The least positive multiple of ``step`` that is at least ``size``."""
    return -(-max(size, 1) // step) * step
