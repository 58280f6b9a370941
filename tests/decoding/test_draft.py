"""Drafters, traced by hand."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.draft import Lookup

EOS = 9


def propose(row, length, *, gamma=4, ngram=3):
    """The lookup draft of one row, as the list of its valid tokens, and its confidence."""
    capacity = 24
    tokens = np.full((1, capacity), 99, np.int32)  # 99 past the length must never be read
    tokens[0, : len(row)] = row
    state = SimpleNamespace(
        tokens=jnp.asarray(tokens),
        length=jnp.asarray([length]),
        capacity=capacity,
        done=jnp.zeros(1, bool),
    )
    inputs = SimpleNamespace(is_eos=lambda tokens: tokens == EOS)
    proposal = Lookup(gamma, ngram).propose(inputs, state, None)
    draft = proposal.draft
    valid = np.asarray(draft.valid[0, 1:])
    assert (np.diff(valid.astype(int)) <= 0).all(), "valid tokens come first"
    assert int(draft.tokens[0, 0]) == row[length - 1]
    return np.asarray(draft.tokens[0, 1:])[valid].tolist(), int(proposal.confidence[0])


@pytest.mark.parametrize(
    ("row", "drafted", "matched"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2], 3),  # the trigram 1 2 3
        ([7, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2], 2),  # only the bigram 2 3 recurs
        ([3, 8, 3, 6, 1, 3], [6, 1, 3], 1),  # a single token: the most recent 3, cut at the end
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2], 2),  # most recent of two matches
        ([5, 1, 2, 3, 6, 3, 7, 1, 2, 3], [6, 3, 7, 1], 3),  # a longer match beats a more recent one
        ([1, 2, 3, 4], [], 0),  # nothing recurs
        ([4], [], 0),
        ([4, 4], [4], 1),
        ([1, 2, EOS, 5, 1, 2], [EOS], 2),  # a draft ends at its first end of sequence
    ],
)
def test_lookup(row, drafted, matched):
    """The confidence of a draft is the length of its match, less one."""
    assert propose(row, len(row)) == (drafted, matched - 1)


def test_lookup_sees_only_the_rows_own_length():
    assert propose([1, 2, 3, 1, 2, 8, 1, 2], 5) == ([3, 1, 2], 1)
