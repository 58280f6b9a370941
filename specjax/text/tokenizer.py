"""Tokenizers: text to token ids and back, incremental decoding, chat prompts.

A tokenizer is read from ``tokenizer.json``, which takes 0.05 s. transformers is imported only for
directories without that file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from specjax._util.checks import FLAG, TEXT, Check, either, list_of, require_all, satisfying
from specjax._util.errors import (
    ModelError,
    OptionError,
    errors_as,
    silence_failures,
    silence_stderr,
)
from specjax._util.files import check_entries
from specjax.models.gguf.header import read_header
from specjax.models.hf.files import read_json, read_text_file
from specjax.text import chat
from specjax.text.byte_level import BYTE_OF
from specjax.text.gguf_tokenizer import TEMPLATE, read_tokenizer
from specjax.text.incremental_decoder import IncrementalDecoder

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")  # what templates may name
TRIAL = "a bé"  # encoded once, to see that a tokenizer works
MAX_ID = 2**24  # tables over the vocabulary have a row for each id
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # SentencePiece's token of a single byte


def _object_of_texts(*names: str) -> Check:
    """The check for an object with texts under these names."""

    def holds(value: Any) -> bool:
        return type(value) is dict and all(type(value.get(name)) is str for name in names)

    return satisfying(f"an object with {' and '.join(names)}", holds)


TOOL_USE = "tool_use"  # transformers' name of the template for tools
# What tokenizer_config.json may hold.
SETTINGS = dict.fromkeys(SPECIAL, either(TEXT, _object_of_texts("content"))) | {
    "chat_template": either(TEXT, list_of(_object_of_texts("name", "template"))),
    "add_bos_token": FLAG,
}


class Tokenizer:
    """Encodes and decodes texts; knows which ids exist and how it differs from another.

    Args:
      backend: the tokenizer of the ``tokenizers`` library.
      chat_template: in Jinja; None: the model has none.
      special: the special tokens that the template may name, such as ``bos_token``.
      source: the model that it belongs to; errors name it.
      tool_template: of chats with tools; None: as others.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: str | None = None,
        special: dict[str, str] | None = None,
        source: str = "this model",
        tool_template: str | None = None,
    ):
        self._backend = backend
        self._source = source
        self._chat_template = chat_template
        self._tool_template = tool_template or chat_template
        self._special = special or {}

        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        """One more than the highest id: ids from here on have probability 0."""
        added = backend.get_added_tokens_decoder()
        special_ids = {i for i, token in added.items() if token.special}
        self._special_ids = special_ids
        self._text_ids = set(vocab.values()) - special_ids
        # The byte that each byte token stands for, where the decoder makes characters of bytes.
        self._byte_of_id: dict[int, int] = {}
        if "ByteFallback" in _decoder_settings(backend):
            for token, i in vocab.items():
                if BYTE_TOKEN.fullmatch(token) and i in self._text_ids:
                    self._byte_of_id[i] = int(token[3:5], 16)

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
        template, special = read_chat_settings(home)
        if os.path.lexists(home / "tokenizer.json"):
            backend = read_backend(home / "tokenizer.json")
        else:
            backend = _backend_from_transformers(directory)
        return cls(backend, template, special, str(directory), read_tool_template(home))

    @classmethod
    def from_gguf(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a GGUF file.

        Raises:
          ModelError: the file cannot be read, or its tokenizer is not known.
        """
        parts = read_tokenizer(read_header(Path(path)))
        if len(parts.template or "") > chat.MAX_TEMPLATE:
            raise ModelError(f"{path}: {TEMPLATE} is longer than {chat.MAX_TEMPLATE} characters")
        with errors_as(f"{path}: not a readable tokenizer"), silence_stderr():
            backend = _validated(parts.backend)
        return cls(backend, parts.template, parts.special, str(path))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with ``add_special_tokens`` also those that the checkpoint puts around a text.

        Raises:
          OptionError: the text holds half of a surrogate pair, as JSON escapes can. Or the
            tokenizer gives up on it: a pattern of its file may backtrack without end.
        """
        failed = f"the tokenizer of {self._source} cannot encode a text"
        with errors_as(failed, OptionError), silence_failures():  # Rust reports its panic there
            try:
                # A batch releases the interpreter's lock, so that other threads go on.
                (encoding,) = self._backend.encode_batch(
                    [text], add_special_tokens=add_special_tokens
                )
            except TypeError:
                raise OptionError(
                    "a text holds half of a surrogate pair, or is none; give whole characters"
                ) from None
            return encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; special tokens have none."""
        return self.decode_after((), ids)

    def decode_after(self, context: Sequence[int], ids: Sequence[int]) -> str:
        """The text that ``ids`` add to the text of ``context``.

        It is ``decode(context + ids)`` without ``decode(context)``. Some decoders drop the space
        before a text's first word, so ids that continue a text must not be decoded alone.
        """
        decoder = IncrementalDecoder(self, context)
        return decoder.push(ids) + decoder.flush()

    @property
    def eos_id(self) -> int | None:
        """The id of the checkpoint's ``eos_token``; None if it names none that exists."""
        return self._backend.token_to_id(self._special.get("eos_token") or "")

    def special_token(self, text: str) -> int | None:
        """The id of the special token with exactly this text; None if there is none."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._special_ids else None

    @functools.cached_property
    def special_texts(self) -> dict[int, str]:
        """The text of each special token that has any, by its id."""
        named = ((i, self.id_to_token(i)) for i in self._special_ids)
        return {i: text for i, text in named if text}

    def bytes_of(self, token_id: int) -> bytes:
        """The UTF-8 bytes that an id adds to a text; empty for special tokens and unused ids."""
        if token_id >= self.vocab_size:
            return b""
        return self.token_bytes()[token_id]

    def token_name(self, token_id: int) -> str:
        """What to call a token: its text; its bytes if they are no whole characters.

        A special token has its content as name, and an id without a token its number.
        """
        token = self._backend.id_to_token(token_id)
        if token is None:
            return f"token_id:{token_id}"
        if token_id in self._special_ids:
            return token
        own_bytes = self.bytes_of(token_id)
        try:
            return own_bytes.decode()
        except UnicodeDecodeError:
            # As OpenAI names them, e.g. bytes:\\xe6\\x97.
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own_bytes)

    def decode_whole(self, ids: Sequence[int]) -> str:
        """The text of ids as the library decodes them, all at a time."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def decode_with_special(self, ids: Sequence[int]) -> str:
        """The text of ids, with special tokens as the vocabulary writes them."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def has_text(self, token_id: int) -> bool:
        """Whether the id is a token, and not a special one."""
        return token_id in self._text_ids

    def byte_of(self, token_id: int) -> int | None:
        """The byte that a byte token stands for; None for other tokens."""
        return self._byte_of_id.get(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token; None where there is no such token."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str:
        """The token of an id as the vocabulary writes it; empty where there is none."""
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self) -> list[bytes]:
        """The UTF-8 bytes that each id adds to a text; empty for special tokens and unused ids.

        The bytes are read from the token itself. Byte-level vocabularies have a character per byte;
        SentencePiece writes a space as ``▁``.
        """
        return self._token_bytes

    @functools.cached_property
    def _token_bytes(self) -> list[bytes]:
        byte_level = "ByteLevel" in _decoder_settings(self._backend)
        token_bytes = [b""] * self.vocab_size
        for token, i in self._backend.get_vocab(with_added_tokens=True).items():
            if i not in self._text_ids:
                continue
            if BYTE_TOKEN.fullmatch(token) and not byte_level:
                token_bytes[i] = bytes([int(token[3:5], 16)])
            elif byte_level and all(character in BYTE_OF for character in token):
                token_bytes[i] = bytes(BYTE_OF[character] for character in token)
            else:
                token_bytes[i] = token.replace("▁", " ").encode()
        return token_bytes

    @property
    def max_token_bytes(self) -> int:
        """The most bytes of a text that one token can stand for, special tokens included."""
        added = self._backend.get_added_tokens_decoder().values()
        texts = [token.content.encode() for token in added]
        return max(map(len, [*self.token_bytes(), *texts]))

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

    def to_json(self) -> str:
        """The text of its ``tokenizer.json``."""
        return self._backend.to_str()

    @property
    def source(self) -> str:
        """The model that it belongs to."""
        return self._source

    def settings(self) -> dict[str, Any]:
        """Its ``tokenizer_config.json``: special tokens and chat template."""
        special = {name: token for name, token in self._special.items() if token}
        template = {"chat_template": self._chat_template} if self._chat_template else {}
        return {"tokenizer_class": "PreTrainedTokenizerFast"} | special | template

    @property
    def template_digest(self) -> str:
        """:func:`template_digest` of its chat template."""
        return template_digest(self._chat_template)

    @property
    def tool_template(self) -> str | None:
        """The checkpoint's chat template where there are tools, in Jinja; None: it has none."""
        return self._tool_template

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
          options: further variables of the template. With ``tools`` it is the one for tools.
        Raises:
          ModelError: the model has no chat template, or the template fails.
        """
        if not self._chat_template:
            raise ModelError(f"--chat: {self._source} has no chat template; leave --chat out")
        if isinstance(message, str):
            messages = [{"role": "user", "content": message}]
        else:
            messages = message
        template = self._chat_template
        if options and options.get("tools"):
            template = self._tool_template or template
        return chat.render(template, messages, self._special, self._source, options)

    def encode_chat(
        self, message: str | list[dict[str, str]], options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The token ids of :meth:`apply_chat`'s text.

        The template itself writes the special tokens, such as ``<s>``. So none are added: a second
        BOS would change what the model answers.
        """
        return self.encode(self.apply_chat(message, options), add_special_tokens=False)


def template_digest(template: str | None) -> str:
    """SHA-256 of a chat template, as hex digits; empty where there is none."""
    return hashlib.sha256(template.encode()).hexdigest() if template else ""


def read_chat_settings(home: Path) -> tuple[str | None, dict[str, str]]:
    """(the chat template of a directory, the special tokens that it may name).

    Raises:
      ModelError: a file of them is damaged.
    """
    settings = _read_settings(home)
    special = {name: _content(settings.get(name)) for name in SPECIAL}
    return _template(home, settings), special


def read_tool_template(home: Path) -> str | None:
    """The chat template that a directory has for tools alone; None: it has none.

    Raises:
      ModelError: it is damaged.
    """
    path = home / "additional_chat_templates" / f"{TOOL_USE}.jinja"
    if os.path.lexists(path):
        return _read_template(path)
    template = _read_settings(home).get("chat_template")
    if not isinstance(template, list):
        return None
    return _by_name(template).get(TOOL_USE)


def _read_settings(home: Path) -> dict[str, Any]:
    path = home / "tokenizer_config.json"
    settings = read_json(path)
    require_all(f"{path}: ", settings, SETTINGS, ModelError)
    return settings


def _decoder_settings(backend: tokenizers.Tokenizer) -> str:
    """The settings of the tokenizer's decoder, as JSON; "" if it has none."""
    if backend.decoder is None:
        return ""
    return backend.decoder.__getstate__().decode()


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a ``tokenizer.json``, after it has encoded a short text.

    If ``tokenizer_config.json`` beside it asks for BOS before a text, it adds BOS.

    Raises:
      ModelError: there is no such file, one of the two is damaged, or the tokenizer cannot encode.
    """
    text = read_text_file(path)
    settings = _read_settings(path.parent)
    with errors_as(f"{path}: not a readable tokenizer"), silence_stderr():
        backend = tokenizers.Tokenizer.from_str(text.decode())
        # The file may store the training run's truncation and padding. transformers ignores both,
        # and prompts must stay whole.
        backend.no_truncation()
        backend.no_padding()
        _add_bos(backend, settings)
        return _validated(backend)


def _add_bos(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Puts BOS before a text where ``settings`` ask for it and the tokenizer writes none.

    DeepSeek's checkpoints ask for it there alone. transformers 4 honours it. transformers 5 does
    not where there is a ``tokenizer.json``.
    """
    bos = _content(settings.get("bos_token"))
    bos_id = backend.token_to_id(bos)
    if not settings.get("add_bos_token") or bos_id is None or bos_id in backend.encode("").ids:
        return
    # Under a name of ours: of the token's own text, a space or "$" would be template syntax.
    token = {"id": "bos", "ids": [bos_id], "tokens": [bos]}
    steps = [tokenizers.processors.TemplateProcessing("bos $A", special_tokens=[token])]
    if backend.post_processor is not None:
        steps.insert(0, backend.post_processor)
    backend.post_processor = tokenizers.processors.Sequence(steps)


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
        return _read_template(path)
    template = settings.get("chat_template")
    if not isinstance(template, list):
        return template
    return _by_name(template).get("default")


def _read_template(path: Path) -> str:
    with errors_as(f"{path}: not a readable text"):
        template = read_text_file(path).decode()
    if len(template) > chat.MAX_TEMPLATE:
        raise ModelError(f"{path}: longer than {chat.MAX_TEMPLATE} characters")
    return template


def _by_name(templates: list[dict[str, str]]) -> dict[str, str]:
    return {entry["name"]: entry["template"] for entry in templates}


def _content(token: str | dict | None) -> str:
    """The text of a special token, which may be an object with further settings."""
    if isinstance(token, dict):
        return token["content"]
    return token or ""
