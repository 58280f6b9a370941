"""The tokenizer of a GGUF file, from its metadata: equal to what transformers makes of the file.

Where transformers ignores what a file or llama.cpp says, it is the model's own tokenizer instead:
special tokens with any characters, :data:`WHOLE_WORDS`, BLOOM's pattern, ``add_space_prefix``.

transformers needs torch for it, so the tokenizer is made here, with the ``tokenizers`` library. Two
models of tokenizers are known. ``gpt2`` is a byte-level BPE; ``tokenizer.ggml.pre`` names the
pattern that splits a text before it. ``llama`` is SentencePiece's BPE with byte fallback. Its
merges are not in the file: they follow from the vocabulary and its scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from specjax._util.checks import FLAG, TEXT, Check, quoted, require_all, whole
from specjax._util.errors import ModelError, errors_as
from specjax.models.gguf.config import (
    ARCHITECTURE,
    CONTROL,
    NUMBERS,
    STRINGS,
    TOKEN_TYPES,
    TOKENIZER,
    TOKENS,
    USER_DEFINED,
)
from specjax.models.gguf.header import Header
from specjax.text.byte_level import CHARACTER_OF

SPACE = "▁"  # as SentencePiece writes a space
TEMPLATE = "tokenizer.chat_template"

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}{_REST}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
# The pattern for each name of ``tokenizer.ggml.pre``; None: GPT-2's own.
PATTERNS: dict[str | None, str | None] = {
    **dict.fromkeys((None, "default", "gpt-2", "smollm", "olmo", "phi-2", "mpt", "jais")),
    **dict.fromkeys(("starcoder", "refact", "codeshell", "exaone", "roberta-bpe")),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "bloom": _BLOOM,
}

# With these llama.cpp takes a word that is a token as it is, whatever the merges, and adds BOS
# where the file does not say.
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken")

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}


class GGUFTokenizer(NamedTuple):
    """A tokenizer's parts: the library's tokenizer, the chat template, the special tokens."""

    backend: Tokenizer
    template: str | None
    special: dict[str, str]


def read_tokenizer(header: Header) -> GGUFTokenizer:
    """The tokenizer that a file's metadata describe.

    Raises:
      ModelError: there is none, its model or its pattern is not known, or a value is wrong.
    """
    values = {
        key.removeprefix(TOKENIZER): value
        for key, value in header.metadata.items()
        if key.startswith(TOKENIZER)
    }
    _check(header, values)
    tokens = values["tokens"]
    special = {
        name: tokens[values[key]] for name, key in _SPECIAL.items() if values.get(key) is not None
    }
    with errors_as(f"{header.path}: its tokenizer cannot be made"):
        if values["model"] == "gpt2":
            backend = _byte_level(values)
        elif header.metadata[ARCHITECTURE].startswith("gemma"):
            backend = _gemma(values, special)
        else:
            backend = _sentencepiece(values)
        _add_tokens(backend, values)
        _add_ends(backend, values, special)
    return GGUFTokenizer(backend, header.metadata.get(TEMPLATE), special)


def _check(header: Header, values: Mapping[str, Any]) -> None:
    """Checks what is read of the metadata.

    Raises:
      ModelError: names the key, its value, and what was expected.
    """
    model = values.get("model")
    if model not in ("gpt2", "llama"):
        raise ModelError(
            f"{header.path}: {TOKENIZER}model {quoted(model)} is no tokenizer that is read here; "
            "supported: gpt2, llama"
        )
    pattern = values.get("pre")
    if model == "gpt2" and (not isinstance(pattern, str | None) or pattern not in PATTERNS):
        known = ", ".join(name for name in PATTERNS if name)
        raise ModelError(
            f"{header.path}: {TOKENIZER}pre {quoted(pattern)} is not known; supported: {known}"
        )
    ranks = "merges" if model == "gpt2" or "merges" in values else "scores"
    for name in ("tokens", ranks):
        if not values.get(name):
            raise ModelError(f"{header.path}: its metadata lack {TOKENIZER}{name}")
    checks: dict[str, Check] = {
        TOKENS: STRINGS,
        f"{TOKENIZER}merges": STRINGS,
        f"{TOKENIZER}scores": NUMBERS,
        TOKEN_TYPES: NUMBERS,
        f"{TOKENIZER}add_bos_token": FLAG,
        f"{TOKENIZER}add_eos_token": FLAG,
        f"{TOKENIZER}add_space_prefix": FLAG,
        TEMPLATE: TEXT,
    }
    require_all(f"{header.path}: ", header.metadata, checks, ModelError)
    one_id = whole(0, len(values["tokens"]) - 1)
    ids = {f"{TOKENIZER}{key}": one_id for key in _SPECIAL.values()}
    require_all(f"{header.path}: ", header.metadata, ids, ModelError)
    for name in ("scores", "token_type"):
        if name in values and len(values[name]) != len(values["tokens"]):
            raise ModelError(
                f"{header.path}: {TOKENIZER}{name} has {len(values[name])} entries for "
                f"{len(values['tokens'])} tokens"
            )


def _byte_level(values: Mapping[str, Any]) -> Tokenizer:
    """GPT-2's kind: every token is written with one character for each byte.

    Special tokens are written as they are: DeepSeek's have characters beyond those of bytes.
    """
    alphabet = set(CHARACTER_OF.values())
    tokens = values["tokens"]
    types = values.get("token_type") or [None] * len(tokens)
    vocab = {}
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != CONTROL and not set(token) <= alphabet:
            token = "".join(CHARACTER_OF[byte] for byte in token.encode())
        vocab[token] = i
    model = models.BPE(
        vocab=vocab,
        merges=_pairs(values["merges"]),
        continuing_subword_prefix="",
        end_of_word_suffix="",
        fuse_unk=False,
        ignore_merges=values.get("pre") in WHOLE_WORDS,
    )
    backend = Tokenizer(model)
    pattern = PATTERNS[values.get("pre")]
    if pattern is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, characters])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(values: Mapping[str, Any]) -> Tokenizer:
    """Llama's kind: a space stands before most texts, and unknown characters are bytes."""
    vocab = {token: i for i, token in enumerate(values["tokens"])}
    if "merges" in values:
        merges = _pairs(values["merges"])
    else:
        merges = merges_of(vocab, dict(zip(vocab, values["scores"], strict=False)))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    scheme = "never"
    if values.get("add_space_prefix", True):
        scheme = "first"
        steps.append(decoders.Strip(content=" ", left=1))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme=scheme, split=False
    )
    backend.decoder = decoders.Sequence(steps)
    return backend


def _gemma(values: Mapping[str, Any], special: Mapping[str, str]) -> Tokenizer:
    """Gemma's kind of SentencePiece: no space before a text, and runs of spaces are tokens."""
    vocab = {}
    for i, token in enumerate(values["tokens"]):
        # The file writes a run of spaces as it is, the model as SentencePiece does.
        is_run = " " in token and not token.strip()
        vocab[SPACE * len(token) if is_run else token] = i
    if "merges" in values:
        merges = _pairs(values["merges"])
    else:
        # The scores do not follow the order of the merges; the order of the tokens does.
        merges = merges_of(vocab, {token: -i for token, i in vocab.items()})
    model = models.BPE(
        vocab=vocab,
        merges=merges,
        fuse_unk=True,
        unk_token=special.get("unk_token", "<unk>"),
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """The two parts of each merge.

    Raises:
      ValueError: a merge has not exactly two.
    """
    pairs = []
    for merge in merges:
        parts = merge.split(" ")
        if len(parts) != 2:
            raise ValueError(f"merge {merge!r} has not two parts")
        pairs.append((parts[0], parts[1]))
    return pairs


def merges_of(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges that a vocabulary implies: all pairs of tokens that make a token, best first."""
    merges = []
    for token, score in scores.items():
        pairs = []
        for i in range(1, len(token)):
            left = token[:i]
            right = token[i:]
            if left in vocab and right in vocab:
                pairs.append((left, right, score))
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += pairs
    merges.sort(key=lambda pair: (pair[2], len(pair[0]), len(pair[1])), reverse=True)
    return [(left, right) for left, right, _ in merges]


def _add_tokens(backend: Tokenizer, values: Mapping[str, Any]) -> None:
    """Adds the tokens that stand for themselves in a text: special ones, and a user's own."""
    types = values.get("token_type") or ()
    special = []
    own = []
    for token, kind in zip(values["tokens"], types, strict=False):
        if kind == CONTROL:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED and backend.token_to_id(token) is not None:
            own.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(own)


def _add_ends(backend: Tokenizer, values: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Adds BOS before and EOS after a text, as far as the file asks for them."""
    # Many files do not say; llama.cpp then adds BOS to a vocabulary of SentencePiece, too.
    usual = values["model"] == "llama" or values.get("pre") in WHOLE_WORDS
    wants_bos = values.get("add_bos_token", usual)
    bos = special.get("bos_token") if wants_bos else None
    eos = special.get("eos_token") if values.get("add_eos_token") else None
    # Under names of ours: of a token's own text, a space or "$" would be template syntax.
    ends = {name: text for name, text in (("bos", bos), ("eos", eos)) if text is not None}
    single = " ".join(name for name in ("bos", "$A", "eos") if name in ends or name == "$A")
    tokens = [
        {"id": name, "ids": [backend.token_to_id(text)], "tokens": [text]}
        for name, text in ends.items()
    ]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
