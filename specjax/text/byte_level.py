"""The characters that byte-level vocabularies write for bytes (GPT-2).

Printable bytes stand for themselves; the others are written as characters from U+0100 on.
"""

from __future__ import annotations


def _bytes_by_character() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    by_character = {chr(byte): byte for byte in printable}
    for i, byte in enumerate(others):
        by_character[chr(0x100 + i)] = byte
    return by_character


BYTE_OF = _bytes_by_character()
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}
