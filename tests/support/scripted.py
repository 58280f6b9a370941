"""A model that writes what it is told, over a tokenizer of Llama 1 and 2's kind."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import tokenizers

import specjax as sj
from specjax.models import ModelConfig, init_params
from specjax.models.hf.write import save_pretrained
from specjax.text.tokenizer import Tokenizer

BYTES = [f"<0x{i:02X}>" for i in range(256)]


def strip_tokenizer(*pieces: str, special: tuple[str, ...] = ("<s>", "</s>")) -> Tokenizer:
    """A tokenizer whose decoder strips the first space of a text, as SentencePiece's do.

    Its tokens are the special ones, every byte, and ``pieces``, in which ▁ is a space.
    """
    names = [*special, *BYTES, *pieces]
    model = tokenizers.models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(list(special))
    parts = tokenizers.decoders
    backend.decoder = parts.Sequence(
        [parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


def ids_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    """The ids of tokens by their names."""
    ids = [tokenizer.token_to_id(piece) for piece in pieces]
    assert None not in ids, pieces
    return ids


def writer(tokenizer: Tokenizer, ids: list[int], eos: int) -> sj.LM:
    """A model that continues each id of ``ids`` with the next one, and the last with ``eos``."""
    cfg, params = _writer(tokenizer, ids, eos)
    return sj.from_params(cfg, params, tokenizer, eos_ids=cfg.eos_ids)


def save_writer(directory: Path, tokenizer: Tokenizer, ids: list[int], eos: int) -> None:
    """The checkpoint of a :func:`writer`."""
    cfg, params = _writer(tokenizer, ids, eos)
    save_pretrained(directory, cfg, params, tokenizer.to_json())


def _writer(tokenizer: Tokenizer, ids: list[int], eos: int) -> tuple[ModelConfig, dict]:
    assert len(set(ids)) == len(ids), "an id can have one successor only"
    size = tokenizer.vocab_size
    width = size + size % 2  # an even number of features, at least one for each id
    cfg = ModelConfig.llama(
        vocab_size=size,
        hidden_size=width,
        num_layers=1,
        num_heads=1,
        intermediate_size=8,
        max_position=256,
        tie_embeddings=False,
        eos_ids=(eos,),
    )
    params = init_params(cfg, jax.random.key(0))
    # The block adds nothing, so the state is the token itself, and the head names its successor.
    params["layers"] = jax.tree.map(jnp.zeros_like, params["layers"])
    params["embed"] = jnp.eye(size, width)
    successor = dict(zip(ids, [*ids[1:], eos], strict=True))
    rows = jnp.array([successor.get(i, eos) for i in range(size)])
    params["head"] = jnp.zeros((size, width)).at[rows, jnp.arange(size)].set(1.0)
    return cfg, params
