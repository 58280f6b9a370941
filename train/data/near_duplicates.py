"""Near-duplicate detection by MinHash, to keep copies of held-out text out of the training set.

A document's set is its shingles of `SHINGLE` tokens. Each shingle's hash falls into one of `VALUES`
bins, and the least hash of each bin is kept: MinHash with one permutation (an empty bin copies
a full one, Shrivastava 2017, arXiv 1703.04664). `BANDS` bands of `VALUES / BANDS` values each are
hashed to keys (LSH), and two documents that share a key are near-duplicates.

With a Jaccard similarity J of their sets, that happens with probability 1 − (1 − J^8)^16:
6 % at J = 0.5, 61 % at 0.7, 95 % at 0.8 and 99.99 % at 0.9.

The library `datasketch` has the same method, but hashes each shingle in Python. It was measured at
0.8 M tokens a second and 82 MiB, against 11 M and 52 MiB here, so it would slow tokenizing down.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NEAR_DUPLICATE = "near-duplicates of held-out documents"  # why a document is left out
SHINGLE = 8  # tokens
VALUES = 128  # MinHash values of a document
BANDS = 16
_VALUE_BITS = 57  # the low bits of a hash are its value, the upper 7 its bin
_EMPTY = np.uint64(2**64 - 1)
# Constants of a multiplicative hash: the golden ratio, and MurmurHash3's finalizer.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xFF51AFD7ED558CCD)
_MIX_2 = np.uint64(0xC4CEB9FE1A85EC53)
# By bin: the place of each bin in the order in which an empty one looks for a full one.
_ORDERS = np.stack(
    [np.random.Generator(np.random.Philox(bin)).permutation(VALUES) for bin in range(VALUES)]
).astype(np.uint8)
_LEAST_TOKENS = 4 * SHINGLE  # of a conversation's answers; else so many before each are compared


def compared_tokens(ids: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """The tokens of a document that are compared: of a conversation, what is trained.

    Conversations share a template's system prompt, which says nothing about them. Short answers, as
    labels are, are the same in many of them. Then the tokens before each tell them apart.
    """
    if mask is None or not mask.any():
        return ids
    if mask.sum() >= _LEAST_TOKENS:
        return ids[mask]
    trained = np.cumsum(mask)  # up to each token
    later = np.minimum(np.arange(len(ids)) + _LEAST_TOKENS, len(ids) - 1)
    return ids[trained[later] > trained - mask]


def band_keys(documents: Sequence[np.ndarray]) -> np.ndarray:
    """`[documents, BANDS]` uint64; two documents that share a band's key are near-duplicates.

    Args:
      documents: token ids of each, at least one.
    """
    lengths = np.array([len(ids) for ids in documents])
    owner = np.repeat(np.arange(len(documents)), lengths)
    hashes = _shingle_hashes(documents, owner)

    # The least hash of each document's bins, for all documents at a time.
    bins = owner * VALUES + (hashes >> np.uint64(_VALUE_BITS)).astype(np.int64)
    least = np.full(len(documents) * VALUES, _EMPTY)
    np.minimum.at(least, bins, hashes & np.uint64(2**_VALUE_BITS - 1))

    values = _fill_empty_bins(least.reshape(-1, VALUES)).reshape(-1, BANDS, VALUES // BANDS)
    keys = np.arange(BANDS, dtype=np.uint64)
    for i in range(values.shape[2]):
        keys = _mix_bits(keys * _STEP + values[:, :, i])
    return keys


def _shingle_hashes(documents: Sequence[np.ndarray], owner: np.ndarray) -> np.ndarray:
    """uint64 hash of the shingle that begins at each token of the joined documents."""
    # Zeros after each document, so that its last shingles hold no token of the next one.
    places = np.arange(len(owner)) + (SHINGLE - 1) * owner
    padded = np.zeros(len(owner) + (SHINGLE - 1) * len(documents), np.uint64)
    padded[places] = np.concatenate(documents) + np.uint64(1)

    hashes = np.zeros(len(padded) - SHINGLE + 1, np.uint64)
    for i in range(SHINGLE):
        hashes = hashes * _STEP + padded[i : i + len(hashes)]
    return _mix_bits(hashes[places])


def _fill_empty_bins(least: np.ndarray) -> np.ndarray:
    """Every empty bin copies the full bin that comes first in an order of its own.

    With one order for all, neighbors would copy the same bin. Then a short document's bands would
    each hold one shingle, and a single one in common would make near-duplicates.
    """
    is_full = least != _EMPTY
    source = np.stack([np.where(is_full, order, VALUES).argmin(1) for order in _ORDERS], axis=1)
    return np.take_along_axis(least, np.where(is_full, np.arange(VALUES), source), axis=1)


def _mix_bits(x: np.ndarray) -> np.ndarray:
    """A bijection of 64 bits in which every output bit depends on every input bit."""
    for factor in (_MIX_1, _MIX_2):
        x = (x ^ (x >> np.uint64(33))) * factor
    return x ^ (x >> np.uint64(33))


def any_known(keys: np.ndarray, known: np.ndarray) -> np.ndarray:
    """`[documents]` whether any of a document's keys is among the sorted keys `known`."""
    if not len(known):
        return np.zeros(len(keys), bool)
    places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return (known[places] == keys).any(axis=1)
