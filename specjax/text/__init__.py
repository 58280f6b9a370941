"""Text in and out: tokenizers and chat templates."""

from specjax.text.tokenizer import IncrementalDecoder, Tokenizer

__all__ = ["IncrementalDecoder", "Tokenizer"]
