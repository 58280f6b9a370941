"""Corpora, tokenizers, packed rows."""
