"""The ids that end and begin a document: those of the tokenizer, or of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from specjax._util.checks import quoted
from specjax._util.errors import InputError
from specjax.models import ModelConfig
from specjax.models.hf.files import read_json
from train.data.tokenizer import KNOWN_EOS


class DocumentEnds(NamedTuple):
    """EOS, and BOS if texts begin with one."""

    eos_id: int
    bos_id: int | None


def checkpoint_ends(name: str, model: ModelConfig, tokenizer: Tokenizer) -> DocumentEnds:
    """The ids of a checkpoint that training starts from.

    The config names BOS, but only the tokenizer's template says whether a text begins with it.

    Args:
      name: the checkpoint, as the config names it.

    Raises:
      InputError: the checkpoint names no EOS.
    """
    if not model.eos_ids:
        raise InputError(f"model.init_from={name!r}: config.json names no eos_token_id")
    bos = model.bos_id if model.bos_id in _ids_before_text(tokenizer)[:1] else None
    return DocumentEnds(model.eos_ids[0], bos)


def _ids_before_text(tokenizer: Tokenizer) -> list[int]:
    """The ids that the tokenizer's template writes before a text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start]
    return []


def tokenizer_ends(tokenizer: Tokenizer, path: str, eos: str) -> DocumentEnds:
    """The ids for a new model, from what its tokenizer says.

    EOS is the first that there is: the token ``eos``; ``eos_token`` of a tokenizer_config.json
    beside the tokenizer; the only special token whose name is known to end texts. BOS is what the
    tokenizer's template writes before a text, if that is one token.

    Args:
      path: the tokenizer's file; empty: it was trained for this run.
      eos: the config's ``tokenizer.eos``; may be empty.

    Raises:
      InputError: no such token, or nothing says which token is EOS.
    """
    before = _ids_before_text(tokenizer)
    bos = before[0] if len(before) == 1 else None
    if eos:
        return DocumentEnds(_id_of(tokenizer, eos, f"tokenizer.eos={quoted(eos)}"), bos)

    if path:
        settings_path = Path(path).parent / "tokenizer_config.json"
        token = read_json(settings_path).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if text:
            named = f"{settings_path}: eos_token {quoted(text)}"
            return DocumentEnds(_id_of(tokenizer, text, named), bos)

    special = {x.content: i for i, x in tokenizer.get_added_tokens_decoder().items() if x.special}
    known = [special[token] for token in KNOWN_EOS if token in special]
    if len(known) != 1:
        raise InputError(
            f"tokenizer.path={path!r} does not say which token ends a document: set tokenizer.eos "
            "to its text"
        )
    return DocumentEnds(known[0], bos)


def _id_of(tokenizer: Tokenizer, token: str, named: str) -> int:
    number = tokenizer.token_to_id(token)
    if number is None:
        raise InputError(f"{named} is no token of the tokenizer")
    return number
