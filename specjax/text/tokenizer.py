"""Tokenizers: text to token ids and back, incremental decoding, chat prompts.

A tokenizer is read from ``tokenizer.json``, which takes 0.05 s. transformers is imported only for
directories without that file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from specjax._util.checks import TEXT, Check, either, list_of, require_all, satisfying
from specjax._util.errors import ModelError, OptionError, errors_as, silence_stderr
from specjax._util.files import check_entries
from specjax.models.hf.files import read_json, read_text_file
from specjax.text import chat

REPLACEMENT = "\ufffd"  # what an incomplete UTF-8 sequence decodes to
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")  # what templates may name
TRIAL = "a bé"  # encoded once, to see that a tokenizer works
MAX_ID = 2**24  # tables over the vocabulary have a row for each id
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # SentencePiece's token of a single byte


def _bytes_by_character() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (GPT-2).

    Printable bytes stand for themselves; the others are written as characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    by_character = {chr(byte): byte for byte in printable}
    for i, byte in enumerate(others):
        by_character[chr(0x100 + i)] = byte
    return by_character


_BYTE_OF = _bytes_by_character()


def _object_of_texts(*names: str) -> Check:
    """The check for an object with texts under these names."""

    def holds(value: Any) -> bool:
        return type(value) is dict and all(type(value.get(name)) is str for name in names)

    return satisfying(f"an object with {' and '.join(names)}", holds)


# What tokenizer_config.json may hold.
SETTINGS = dict.fromkeys(SPECIAL, either(TEXT, _object_of_texts("content"))) | {
    "chat_template": either(TEXT, list_of(_object_of_texts("name", "template")))
}


class Tokenizer:
    """Encodes and decodes texts; knows which ids exist and how it differs from another.

    Args:
      backend: the tokenizer of the ``tokenizers`` library.
      chat_template: in Jinja; None: the model has none.
      special: the special tokens that the template may name, such as ``bos_token``.
      source: the model that it belongs to; errors name it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: str | None = None,
        special: dict[str, str] | None = None,
        source: str = "this model",
    ):
        self._backend = backend
        self._source = source
        self._chat_template = chat_template
        self._special = special or {}

        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        """One more than the highest id: ids from here on have probability 0."""
        added = backend.get_added_tokens_decoder()
        special_ids = {i for i, token in added.items() if token.special}
        self._text_ids = set(vocab.values()) - special_ids
        self._byte_ids = {i for token, i in vocab.items() if BYTE_TOKEN.fullmatch(token)}

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """The tokenizer of a model directory, or of its parent: several models may share one.

        Raises:
          ModelError: there is none, or it cannot be read.
        """
        directory = Path(directory)
        home = directory
        for candidate in (directory, directory.parent):
            if os.path.lexists(candidate / "tokenizer.json"):
                home = candidate
                break
        settings_path = home / "tokenizer_config.json"
        settings = read_json(settings_path)
        require_all(f"{settings_path}: ", settings, SETTINGS, ModelError)
        special = {name: _content(settings.get(name)) for name in SPECIAL}
        template = _template(home, settings)
        if os.path.lexists(home / "tokenizer.json"):
            backend = read_backend(home / "tokenizer.json")
        else:
            backend = _backend_from_transformers(directory)
        return cls(backend, template, special, str(directory))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with ``add_special_tokens`` also those that the checkpoint puts around a text.

        Raises:
          OptionError: the text holds half of a surrogate pair, as JSON escapes can. Or the
            tokenizer gives up on it: a pattern of its file may backtrack without end.
        """
        failed = f"the tokenizer of {self._source} cannot encode a text"
        with errors_as(failed, OptionError), silence_stderr():  # Rust panics, and reports it there
            try:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            except TypeError:
                raise OptionError(
                    "a text holds half of a surrogate pair, or is none; give whole characters"
                ) from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._backend.decode(list(map(int, ids)), skip_special_tokens=skip_special_tokens)

    def ends_in_byte(self, ids: Sequence[int]) -> bool:
        """Whether the last id that has text is a byte token."""
        for i in reversed(ids):
            if i in self._text_ids:
                return i in self._byte_ids
        return False

    def token_to_id(self, token: str) -> int | None:
        """The id of a token; None where there is no such token."""
        return self._backend.token_to_id(token)

    def token_bytes(self) -> list[bytes]:
        """The UTF-8 bytes that each id adds to a text; empty for special tokens and unused ids.

        The bytes are read from the token itself. Byte-level vocabularies have a character per byte;
        SentencePiece writes a space as ``▁``.
        """
        decoder = json.loads(self._backend.to_str())["decoder"]
        byte_level = "ByteLevel" in json.dumps(decoder)
        token_bytes = [b""] * self.vocab_size
        for token, i in self._backend.get_vocab(with_added_tokens=True).items():
            if i not in self._text_ids:
                continue
            if BYTE_TOKEN.fullmatch(token) and not byte_level:
                token_bytes[i] = bytes([int(token[3:5], 16)])
            elif byte_level and all(character in _BYTE_OF for character in token):
                token_bytes[i] = bytes(_BYTE_OF[character] for character in token)
            else:
                token_bytes[i] = token.replace("▁", " ").encode()
        return token_bytes

    @property
    def fingerprint(self) -> str:
        """SHA-256 of every id's token, special and other added ones included, as hex digits."""
        vocab = sorted(self._backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(vocab).encode()).hexdigest()

    def difference(self, other: Tokenizer) -> str | None:
        """One clause that says how the other vocabulary differs; None if they are the same."""
        if self.fingerprint == other.fingerprint:
            return None
        if self.vocab_size != other.vocab_size:
            return f"{self.vocab_size} against {other.vocab_size} ids"
        mine = self._backend.get_vocab(with_added_tokens=True)
        theirs = other._backend.get_vocab(with_added_tokens=True)
        moved = sorted((i, token) for token, i in mine.items() if theirs.get(token) != i)
        if not moved:
            return "extra tokens"
        first_id, first_token = moved[0]
        return f"id {first_id} is {first_token!r} only in the first"

    @property
    def chats(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return bool(self._chat_template)

    def apply_chat(
        self, message: str | list[dict[str, str]], options: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt of a chat, by the checkpoint's own template (:mod:`specjax.text.chat`).

        Args:
          message: what the user says, or a list of messages with ``role`` and ``content``.
          options: further variables of the template.
        Raises:
          ModelError: the model has no chat template, or the template fails.
        """
        if not self._chat_template:
            raise ModelError(f"--chat: {self._source} has no chat template; leave --chat out")
        if isinstance(message, str):
            messages = [{"role": "user", "content": message}]
        else:
            messages = message
        return chat.render(self._chat_template, messages, self._special, self._source, options)


class IncrementalDecoder:
    """Decodes a sequence piece by piece; the pieces joined are ``decode`` of all its ids.

    New tokens are decoded with the ones before them: decoded alone they could lose a leading space.
    An incomplete UTF-8 character is kept back until it is complete. So is a run of byte tokens,
    because a decoder checks the whole run for validity.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._context: list[int] = []  # ids of the last piece; their text has been returned
        self._pending: list[int] = []  # ids whose text has not been returned yet

    def push(self, ids: Sequence[int]) -> str:
        """Adds tokens; returns the new text that no later token can change, which may be empty."""
        self._pending += map(int, ids)
        piece = self._pending_text()
        if piece.endswith(REPLACEMENT) or self._tokenizer.ends_in_byte(self._pending):
            return ""
        return self._accept(piece)

    def flush(self) -> str:
        """The rest of the text, at the end of the sequence."""
        return self._accept(self._pending_text())

    def _pending_text(self) -> str:
        context = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode(self._context + self._pending)
        return text[len(context) :]

    def _accept(self, piece: str) -> str:
        if piece:
            self._context = self._pending
        else:
            # Tokens without text are no context by themselves: the next token would be decoded as
            # the first of a text.
            self._context = self._context + self._pending
        self._pending = []
        return piece


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a ``tokenizer.json``, after it has encoded a short text.

    Raises:
      ModelError: there is no such file, it is damaged, or the tokenizer cannot encode.
    """
    text = read_text_file(path)
    with errors_as(f"{path}: not a readable tokenizer"), silence_stderr():
        backend = tokenizers.Tokenizer.from_str(text.decode())
        # The file may store the training run's truncation and padding. transformers ignores both,
        # and prompts must stay whole.
        backend.no_truncation()
        backend.no_padding()
        return _validated(backend)


def _backend_from_transformers(directory: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a directory without ``tokenizer.json``."""
    names = ("tokenizer.model", "vocab.json", "vocab.txt")
    if not any(os.path.lexists(directory / name) for name in names):
        raise ModelError(f"{directory}: no tokenizer.json")
    from transformers import AutoTokenizer

    with errors_as(f"{directory}: its tokenizer cannot be loaded"), silence_stderr():
        check_entries(directory)
        loaded = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        return _validated(loaded.backend_tokenizer)


def _validated(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer itself.

    Raises:
      ValueError: its ids are too high, or it encodes a text to ids outside its vocabulary.
    """
    highest = max(backend.get_vocab(with_added_tokens=True).values(), default=None)
    if highest is None:
        raise ValueError("its vocabulary is empty")
    if highest > MAX_ID:
        raise ValueError(f"it has an id of {highest}, beyond {MAX_ID}")
    # A post-processor may add ids that the vocabulary does not have.
    highest_used = max(backend.encode(TRIAL).ids, default=0)
    if highest_used > highest:
        raise ValueError(f"it puts id {highest_used} around a text, and its highest is {highest}")
    return backend


def _template(home: Path, settings: dict) -> str | None:
    """The chat template: a file of its own, a setting, or the default of several named ones."""
    path = home / "chat_template.jinja"
    if os.path.lexists(path):
        with errors_as(f"{path}: not a readable text"):
            template = read_text_file(path).decode()
        if len(template) > chat.MAX_TEMPLATE:
            raise ModelError(f"{path}: longer than {chat.MAX_TEMPLATE} characters")
        return template
    template = settings.get("chat_template")
    if not isinstance(template, list):
        return template
    by_name = {entry["name"]: entry["template"] for entry in template}
    return by_name.get("default")


def _content(token: str | dict | None) -> str:
    """The text of a special token, which may be an object with further settings."""
    if isinstance(token, dict):
        return token["content"]
    return token or ""
