"""A byte-level BPE tokenizer for Python code, trained on the corpus.

Nothing is normalized and every byte is in the alphabet, so encoding and decoding gives back the
exact text.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from specjax._util.errors import InputError, ModelError
from specjax._util.files import write_text
from specjax.text.tokenizer import read_backend
from train.data.corpus import is_evaluated
from train.data.reading import Document

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|fim_eot|>",
)
EOS_ID = 0
# Tokens that end a document in the tokenizers that people train with. A tokenizer that has exactly
# one of them, as a special token, needs no setting.
KNOWN_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[EOS]")
BYTES = 256

# No token crosses the border of these pieces. A line break includes the next line's indentation,
# so one token can be "new line, indented by 8". A word includes one space or punctuation mark
# before it. Numbers are split into groups of at most three digits.
_PIECES = "|".join(
    (
        r"(?:\r?\n)+[ \t]*",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+",
        r"[^\S\r\n]+",
        r"\s",
    )
)


def train_tokenizer(
    documents: Sequence[Document], vocab_size: int, out_path: str | os.PathLike
) -> Tokenizer:
    """Trains on the documents that are not held out, and writes `tokenizer.json` atomically.

    The result depends only on the documents and `vocab_size`.

    Args:
      documents: the corpus.
      vocab_size: number of tokens, including the special ones and the 256 bytes.
      out_path: the file to write.

    Raises:
      InputError: `vocab_size` is too small for the bytes and the special tokens.
    """
    smallest = BYTES + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise InputError(f"vocab_size {vocab_size} is too small: at least {smallest} are needed")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        # Sorted, because the library returns the alphabet in no fixed order.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (document.text for document in documents if not is_evaluated(document))
    tokenizer.train_from_iterator(texts, trainer)
    Path(out_path).parent.mkdir(parents=True, exist_ok=True)
    write_text(out_path, tokenizer.to_str(pretty=True))
    return tokenizer


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """Reads a `tokenizer.json`; raises InputError if it is missing or damaged."""
    try:
        return read_backend(Path(path))
    except ModelError as error:
        raise InputError(f"cannot read the tokenizer {error}") from None


def id_count(tokenizer: Tokenizer) -> int:
    """One more than the highest id. Ids may have holes, so the number of tokens can be less."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def tokenizer_file(directory: Path) -> Path:
    """A checkpoint's tokenizer.json, or its parent's: the embedded models share one."""
    own = directory / "tokenizer.json"
    shared = directory.parent / "tokenizer.json"
    # Not Path.exists, which raises for a name that is too long: who opens the file says so.
    if not os.path.exists(own) and os.path.exists(shared):
        return shared
    return own
