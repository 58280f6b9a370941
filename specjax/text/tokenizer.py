"""Text in and out: tokenizer, incremental decoding, chat templates.

The tokenizer comes straight from ``tokenizer.json`` (0.05 s); transformers is imported only
for directories that have none.
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

from specjax._util.checks import TEXT, Check, either, list_of, require_all
from specjax._util.errors import ModelError, OptionError, foreign, silent
from specjax._util.files import check_entries
from specjax.models.hf.files import read_json, read_text_file
from specjax.text import chat

REPLACEMENT = "\ufffd"  # what an incomplete UTF-8 sequence decodes to
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")  # what templates may name
TRIAL = "a bé"
HIGHEST_ID = 2**24  # tables over the vocabulary have a row for each id
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # a byte that no other token covers (SentencePiece)
# Byte-level vocabularies write printable bytes as themselves and the others from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(b): b for b in _PRINTABLE} | {
    chr(0x100 + i): b for i, b in enumerate(b for b in range(256) if b not in _PRINTABLE)
}


def _texts(*names: str) -> Check:
    """An object with texts under some names."""

    def holds(value: Any) -> bool:
        return type(value) is dict and all(type(value.get(name)) is str for name in names)

    return Check(f"an object with {' and '.join(names)}", holds)


SETTINGS = {name: either(TEXT, _texts("content")) for name in SPECIAL} | {
    "chat_template": either(TEXT, list_of(_texts("name", "template")))
}


class Tokenizer:
    """Encodes and decodes; knows which ids exist and how it differs from another."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: str | None = None,
        special: dict[str, str] | None = None,
        source: str = "this model",
    ):
        self._backend, self._source = backend, source
        self._chat_template, self._special = chat_template, special or {}
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        """One more than the highest id: ids from here on have probability 0."""
        added = backend.get_added_tokens_decoder()
        special_ids = {i for i, token in added.items() if token.special}
        self._spelled = set(vocab.values()) - special_ids  # ids that have text
        self._bytes = {i for token, i in vocab.items() if BYTE_TOKEN.fullmatch(token)}

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """The tokenizer of a model directory, or of its parent (models that share one).

        Raises:
          ModelError: none is there, or it cannot be read.
        """
        directory = Path(directory)
        both = (directory, directory.parent)
        homes = [home for home in both if os.path.lexists(home / "tokenizer.json")]
        home = homes[0] if homes else directory
        settings = read_json(home / "tokenizer_config.json")
        require_all(f"{home / 'tokenizer_config.json'}: ", settings, SETTINGS, ModelError)
        special = {name: _content(settings.get(name)) for name in SPECIAL}
        template = _template(home, settings)
        if homes:
            backend = read_backend(home / "tokenizer.json")
        else:
            backend = _through_transformers(directory)
        return cls(backend, template, special, str(directory))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; ``add_special_tokens`` adds what the checkpoint puts around a text.

        Raises:
          OptionError: it holds half of a surrogate pair, as JSON escapes can.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise OptionError(
                "a text holds half of a surrogate pair, or is none; give whole characters"
            ) from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(map(int, ids)), skip_special_tokens=skip_special_tokens)

    def ends_in_byte(self, ids: Sequence[int]) -> bool:
        """Whether the last id that has text is a byte token."""
        return next((i in self._bytes for i in reversed(ids) if i in self._spelled), False)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def token_bytes(self) -> list[bytes]:
        """What each id adds to a text, in UTF-8; nothing for special tokens.

        Byte-level vocabularies and SentencePiece's (``▁`` is a space) spell it in the token.
        """
        byte_level = "ByteLevel" in json.dumps(json.loads(self._backend.to_str())["decoder"])
        spelled = _BYTE_OF if byte_level else {}
        added = [b""] * self.vocab_size
        for token, i in self._backend.get_vocab(with_added_tokens=True).items():
            if i not in self._spelled:
                continue
            if BYTE_TOKEN.fullmatch(token) and not byte_level:
                added[i] = bytes([int(token[3:5], 16)])
            elif byte_level and all(c in spelled for c in token):
                added[i] = bytes(spelled[c] for c in token)
            else:
                added[i] = token.replace("▁", " ").encode()
        return added

    @property
    def fingerprint(self) -> str:
        """A hash of every id's token, special and other added ones included."""
        vocab = sorted(self._backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(vocab).encode()).hexdigest()

    def difference(self, other: Tokenizer) -> str | None:
        """How the other's vocabulary differs, in one clause; None where they are the same."""
        if self.fingerprint == other.fingerprint:
            return None
        if self.vocab_size != other.vocab_size:
            return f"{self.vocab_size} against {other.vocab_size} ids"
        mine = self._backend.get_vocab(with_added_tokens=True)
        theirs = other._backend.get_vocab(with_added_tokens=True)
        moved = sorted((i, token) for token, i in mine.items() if theirs.get(token) != i)
        return f"id {moved[0][0]} is {moved[0][1]!r} only in the first" if moved else "extra tokens"

    @property
    def chats(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return bool(self._chat_template)

    def apply_chat(
        self, message: str | list[dict[str, str]], options: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt of a chat, by the checkpoint's own template and its ``options``, if it has
        some (:mod:`specjax.text.chat`).

        Raises:
          ModelError: the model has no chat template, or the template fails.
        """
        if not self.chats:
            raise ModelError(f"--chat: {self._source} has no chat template; leave --chat out")
        messages = [{"role": "user", "content": message}] if isinstance(message, str) else message
        return chat.render(self._chat_template, messages, self._special, self._source, options)


class IncrementalDecoder:
    """Text piece by piece; the pieces concatenate to ``decode`` of all ids.

    A piece is what the new tokens add to the decoded text of the last accepted ones: decoded
    alone they could lose a leading space. An incomplete UTF-8 tail is held back, and so is a
    run of byte tokens until it ends: decoders judge the validity of the run as a whole.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: list[int] = []  # shown; begins where a piece began
        self._pending: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain after these tokens."""
        self._pending += map(int, ids)
        piece = self._window()
        if piece.endswith(REPLACEMENT) or self._tokenizer.ends_in_byte(self._pending):
            return ""
        return self._accept(piece)

    def flush(self) -> str:
        """What was held back, at the end of a row."""
        return self._accept(self._window())

    def _window(self) -> str:
        before = self._tokenizer.decode(self._known)
        return self._tokenizer.decode(self._known + self._pending)[len(before) :]

    def _accept(self, piece: str) -> str:
        # Tokens without text (special ones) are no context: what follows would count as first.
        self._known = self._pending if piece else self._known + self._pending
        self._pending = []
        return piece


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a ``tokenizer.json``, tried on a text.

    Raises:
      ModelError: there is none, it is damaged, or it cannot encode.
    """
    text = read_text_file(path)
    with foreign(f"{path}: not a readable tokenizer"), silent():
        backend = tokenizers.Tokenizer.from_str(text.decode())
        # Stored by the training run; transformers ignores both, and prompts must stay whole.
        backend.no_truncation()
        backend.no_padding()
        return _tried(backend)


def _through_transformers(directory: Path) -> tokenizers.Tokenizer:
    names = ("tokenizer.model", "vocab.json", "vocab.txt")
    if not any(os.path.lexists(directory / name) for name in names):
        raise ModelError(f"{directory}: no tokenizer.json")
    from transformers import AutoTokenizer

    with foreign(f"{directory}: its tokenizer cannot be loaded"), silent():
        check_entries(directory)
        loaded = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        return _tried(loaded.backend_tokenizer)


def _tried(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer, if it has ids in reason and puts no others into a text."""
    highest = max(backend.get_vocab(with_added_tokens=True).values(), default=None)
    if highest is None:
        raise ValueError("its vocabulary is empty")
    if highest > HIGHEST_ID:
        raise ValueError(f"it has an id of {highest}, beyond {HIGHEST_ID}")
    framed = max(backend.encode(TRIAL).ids, default=0)
    if framed > highest:
        raise ValueError(f"it puts id {framed} around a text, and its highest is {highest}")
    return backend


def _template(home: Path, settings: dict) -> str | None:
    """The chat template: a file of its own, a setting, or the default of several named ones."""
    file = home / "chat_template.jinja"
    if os.path.lexists(file):
        with foreign(f"{file}: not a readable text"):
            template = read_text_file(file).decode()
        if len(template) > chat.LONGEST_TEMPLATE:
            raise ModelError(f"{file}: longer than {chat.LONGEST_TEMPLATE} characters")
        return template
    template = settings.get("chat_template")
    if not isinstance(template, list):
        return template
    return {named["name"]: named["template"] for named in template}.get("default")


def _content(token: str | dict | None) -> str:
    return token["content"] if isinstance(token, dict) else token or ""
