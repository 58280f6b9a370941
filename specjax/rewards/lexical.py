"""Rewards for words: ``lexical`` (words that must occur) and ``forbidden`` (that must not).

**The rule.** A word occurs where one of its forms stands in the completion between word
boundaries: the bytes before and after are no ASCII letter, digit or underscore and no part of
a multi-byte character; the completion's two ends are boundaries. Letters match in either case.
The forms of ``lexical`` are the word and its regular inflections (:func:`inflections`);
``=word`` is that exact spelling, for identifiers. Matching reads the bytes of the text, so
it does not matter how the text is cut into tokens.

On the device that is Shift-And (Baeza-Yates and Gonnet 1992): a form of n bytes is n bits of a
word, one shift and one mask per byte. Axis legend: F forms, C words, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax._util.arguments import TEXTS, validate_fields
from specjax._util.errors import OptionError
from specjax.rewards.protocol import DeviceReward
from specjax.text.tokenizer import REPLACEMENT, Tokenizer

LONGEST = 32  # bytes of a form: the bits of a word
MOST_WORDS = 1000  # of a row: each form is a kilobyte of masks
MOST_TABLE = 1 << 32  # bytes of the table of all tokens' bytes, as wide as the longest one
VOWELS = "aeiou"
WORD = rb"[0-9A-Za-z_\x80-\xff]"
FORMS, WORDS = 16, 4  # arrays grow in these steps, so that jobs of like size share a program


def inflections(word: str) -> list[str]:
    """The word and its regular inflections: plural, third person, past, participle.

    -s; -es after s, x, z, ch, sh and o; y → -ies, -ied after a consonant; -ed, -d and -ing
    with a final e dropped or, after a single vowel, the final consonant doubled.
    """
    if not re.fullmatch("[A-Za-z]{2,}", word):
        return [word]
    forms = [word, word + "s"]
    last, before = word[-1].lower(), word[-2].lower()
    if re.search("(?i:s|x|z|ch|sh|o)$", word):
        forms.append(word + "es")
    if last == "y" and before not in VOWELS:
        forms += [word[:-1] + "ies", word[:-1] + "ied"]
    if last == "e":
        forms += [word + "d", word[:-1] + "ing"]
    else:
        forms += [word + "ed", word + "ing"]
    single = len(word) > 2 and before in VOWELS and word[-3].lower() not in VOWELS
    if single and last not in VOWELS + "wxy":
        forms += [word + last + "ed", word + last + "ing"]
    return forms


def forms_of(word: str, inflect: bool) -> tuple[list[str], bool]:
    """The forms that count as ``word``, and whether case matters."""
    if word.startswith("="):
        return [word[1:]], True
    return (inflections(word) if inflect else [word]), False


@dataclasses.dataclass(frozen=True)
class ShiftAnd:
    """Shift-And over the completion's bytes; the share of words found.

    ``absent``: the share of words *not* found.
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
            ended = boundary & ((carry["bits"] & own["final"]) > 0)
            occurred = carry["occurred"] | jnp.any(ended[:, None] & own["owner"], axis=0)
            begun = jnp.where(carry["boundary"], jnp.uint32(1), jnp.uint32(0))
            bits = ((carry["bits"] << 1) | begun) & own["masks"][:, byte]
            return {"bits": bits, "boundary": boundary, "occurred": occurred}

        return jax.lax.fori_loop(0, shared["count"][token], push, carry)

    def value(self, shared, own, carry):
        last = (carry["bits"] & own["final"]) > 0
        occurred = carry["occurred"] | jnp.any(last[:, None] & own["owner"], axis=0)
        wanted = own["wanted"].sum()
        share = (occurred & own["wanted"]).sum() / jnp.maximum(wanted, 1).astype(jnp.float32)
        # Nothing to look for: nothing is missing.
        share = jnp.where(wanted > 0, share, jnp.float32(0 if self.absent else 1))
        return 1 - share if self.absent else share


@dataclasses.dataclass(frozen=True)
class Lexical:
    """The share of the required words that occur; ``words`` hold for every row.

    A row's own words are its constraints under ``lexical``. See the module for the rule.
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
        return list(dict.fromkeys([*self.words, *constraints.get(self.name, ())]))

    def check(self, tokenizer, constraints):
        for one in constraints:
            words = self.words_of(one)
            if not words:
                raise OptionError(
                    f"reward {self.name}: there are no words to look for; give "
                    f"--reward {self.name}:WORD,WORD or --task"
                )
            if len(words) > MOST_WORDS:
                raise OptionError(
                    f"reward {self.name}: {len(words)} words for a row; at most {MOST_WORDS} fit"
                )
            for word in words:
                _check_word(self.name, word, self.inflect, tokenizer)

    def score(self, sample):
        words = self.words_of(sample.constraints)
        text = sample.text.encode()
        count = sum(any(p.search(text) for p in _patterns(w, self.inflect)) for w in words)
        # float32 as on the device: thresholds must fall alike.
        share = np.float32(count) / np.float32(len(words))
        return float(np.float32(1) - share if self.absent else share)

    def on_device(self, tokenizer, constraints):
        if tokenizer is None:
            return None
        rows = [self.words_of(one) for one in constraints]
        return DeviceReward(ShiftAnd(self.absent), _shared(tokenizer), self._own(rows))

    def _own(self, rows: list[list[str]]) -> dict[str, np.ndarray]:
        """Masks of every form, all rows padded alike."""
        forms = [list(_bytes_of_forms(words, self.inflect)) for words in rows]
        size = _up(max(map(len, forms)), FORMS)
        words = _up(max(map(len, rows)), WORDS)
        own = {
            "masks": np.zeros((len(rows), size, 256), np.uint32),
            "final": np.zeros((len(rows), size), np.uint32),
            "owner": np.zeros((len(rows), size, words), bool),
            "wanted": np.arange(words) < np.array([len(row) for row in rows])[:, None],
        }
        for row, entries in enumerate(forms):
            for i, (word, form, exact) in enumerate(entries):
                for at, byte in enumerate(form):
                    for same in {byte} if exact else _cases(byte):
                        own["masks"][row, i, same] |= np.uint32(1 << at)
                own["final"][row, i] = np.uint32(1 << (len(form) - 1))
                own["owner"][row, i, word] = True
        return own


@dataclasses.dataclass(frozen=True)
class Forbidden(Lexical):
    """The share of the forbidden words that do not occur: no inflections."""

    name = "forbidden"
    inflect = False
    absent = True


def _check_word(reward: str, word: str, inflect: bool, tokenizer: Tokenizer | None) -> None:
    forms, _ = forms_of(word, inflect)
    if not forms[0].strip():
        raise OptionError(f"reward {reward}: word {word!r} is empty; give at least one letter")
    size = max(len(form.encode(errors="replace")) for form in forms)
    if size > LONGEST:
        raise OptionError(
            f"reward {reward}: {word!r} has forms of {size} bytes; at most {LONGEST} can be matched"
        )
    if tokenizer is None:
        raise OptionError(f"reward {reward} reads text: it needs a target with a tokenizer")
    try:
        again = tokenizer.decode(tokenizer.encode(forms[0], False))
    except OptionError:  # half of a surrogate pair
        again = REPLACEMENT
    if forms[0] not in again:
        raise OptionError(
            f"reward {reward}: the target's tokenizer cannot encode {forms[0]!r} "
            f"(it reads back as {again!r}); leave the word out"
        )


def _bytes_of_forms(words: Sequence[str], inflect: bool) -> Iterator[tuple[int, bytes, bool]]:
    for i, word in enumerate(words):
        forms, exact = forms_of(word, inflect)
        for form in dict.fromkeys(forms):
            yield i, form.encode(), exact


def _patterns(word: str, inflect: bool) -> Iterator[re.Pattern]:
    for _, form, exact in _bytes_of_forms([word], inflect):
        flags = 0 if exact else re.IGNORECASE
        yield re.compile(b"(?<!%b)%b(?!%b)" % (WORD, re.escape(form), WORD), flags)


def _cases(byte: int) -> set[int]:
    return {ord(chr(byte).lower()), ord(chr(byte).upper())} if byte < 128 else {byte}


@functools.lru_cache(maxsize=4)
def _shared(tokenizer: Tokenizer) -> dict[str, jax.Array]:
    """Tables over ids and bytes: each token's bytes, and which bytes belong to words.

    Kept, for a job asks with every batch and a large vocabulary takes a second.
    """
    spelled = tokenizer.token_bytes()
    widest = max(1, *map(len, spelled))
    if len(spelled) * widest > MOST_TABLE:
        raise OptionError(
            f"rewards of words: the target's longest token has {widest} bytes, which makes a table "
            "over its vocabulary too large"
        )
    table = np.zeros((len(spelled), widest), np.uint8)
    for i, text in enumerate(spelled):
        table[i, : len(text)] = np.frombuffer(text, np.uint8)
    word = np.array([re.match(WORD, bytes([b])) is not None for b in range(256)])
    count = np.array([len(text) for text in spelled], np.int32)
    return {"bytes": jnp.asarray(table), "count": jnp.asarray(count), "word": jnp.asarray(word)}


def _up(size: int, step: int) -> int:
    return -(-max(size, 1) // step) * step
