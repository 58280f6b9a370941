"""Logits under the settings that read a row's tokens: biases, penalties, bans, minimum length.

They act at every node of a draft, on the logits of its model, before temperature and truncation. A
node's text is the row's committed tokens and the path from the root to the node. So the result is
a distribution that depends on the text alone, as any target distribution, and rules and drafters
need not know of it.

The order is that of transformers: biases, repetition penalty, (presence and frequency penalty,
DRY), repeated n-grams, banned words, minimum length, length decay. Those in parentheses are not in
transformers. If everything would be banned at a node, its bans are dropped.

Counts of tokens are kept per row between rounds (:class:`specjax.core.types.TokenCounts`). Where
no row has such settings there are none, and programs are what they would be without this module.

Axis legend: B rows, N nodes, D most tokens of a path, S cache positions, W banned words, L tokens
of a word, V vocabulary. Functions of one node have no B and N.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax._util.checks import LARGEST
from specjax.core import probs
from specjax.core.types import NO_TOKEN, DecodeState, Inputs, PathSettings, TokenCounts

LONGEST_REPETITION = 64  # tokens of a repetition that the DRY penalty tells apart

Logits = Float[Array, "B N V"]
Paths = Int[Array, "B N D"]


@jax.named_scope("path settings")
def path_logits(inputs: Inputs, state: DecodeState, logits: Logits, paths: Paths) -> Logits:
    """The logits after each node under the rows' settings; ``logits`` itself where there are none.

    Args:
      inputs, state: of the round; ``state.tokens`` are the committed tokens.
      logits: over the target's ids, float32.
      paths: the tokens below the root on the way to each node, its own included, then NO_TOKEN.
    """
    settings = inputs.warp.path
    counts = state.counts
    if settings is None:
        return logits
    assert counts is not None, "a state that begins with such settings has counts"
    generated = counts.generated[:, None] + _count(paths, logits.shape[-1])
    written = generated > 0
    x = logits + counts.bias[:, None]
    seen = counts.in_prompt[:, None] | written
    repetition = _per_row(settings.repetition_penalty)
    # CTRL (Keskar et al. 2019, arXiv 1909.05858, §4.1), with the sign rule of transformers.
    x = jnp.where(seen, jnp.where(x < 0, x * repetition, x / repetition), x)
    x = x - generated * _per_row(settings.frequency_penalty)
    x = x - written * _per_row(settings.presence_penalty)
    x = _add_dry(settings, state, x, paths)
    x = _ban_repeated_ngrams(settings, state, x, paths)
    x = _ban_words(settings, state, x, paths)
    x = _bound_length(settings, state, x, paths)
    return unless_empty(x, logits)


def unless_empty(x: Logits, otherwise: Logits) -> Logits:
    """``x``, but ``otherwise`` at nodes where no token is left."""
    return jnp.where(jnp.any(x > probs.NEVER, axis=-1, keepdims=True), x, otherwise)


# --- counts ------------------------------------------------------------------------------------


def begin_counts(inputs: Inputs, state: DecodeState) -> TokenCounts | None:
    """The counts of a state's tokens; None where no row has settings that need them."""
    settings = inputs.warp.path
    if settings is None:
        return None
    rows, capacity = state.tokens.shape
    shape = rows, inputs.target.vocab
    ids = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    row = jnp.arange(rows)[:, None]
    at = jnp.arange(capacity)
    in_prompt = at < state.prompt_length[:, None]
    is_new = ~in_prompt & (at < state.length[:, None])

    # Of a firm type: Python's 0.0 would give the first state of a batch programs of its own.
    base = jnp.where(settings.only_biased, probs.NEVER, jnp.float32(0))[:, None]
    # A padding id is moved out of range, where a scatter drops it: −1 would be the last id.
    place = jnp.where(settings.bias_ids == NO_TOKEN, shape[1], settings.bias_ids)
    bias = jnp.broadcast_to(base, shape).at[row, place].set(settings.biases, mode="drop")
    return TokenCounts(
        bias=bias,
        ends=inputs.is_eos(ids),
        in_prompt=jnp.zeros(shape, bool).at[row, state.tokens].max(in_prompt, mode="drop"),
        generated=_add_tokens(jnp.zeros(shape, jnp.int32), state.tokens, is_new),
    )


def count_new(
    counts: TokenCounts | None, tokens: Int[Array, "B n"], emitted: Int[Array, "B"]
) -> TokenCounts | None:
    """The counts with the first ``emitted`` of each row's tokens."""
    if counts is None:
        return None
    is_new = jnp.arange(tokens.shape[1]) < emitted[:, None]
    return counts.replace(generated=_add_tokens(counts.generated, tokens, is_new))


def _add_tokens(
    generated: Int[Array, "B V"], tokens: Int[Array, "B n"], counted: Bool[Array, "B n"]
) -> Int[Array, "B V"]:
    row = jnp.arange(tokens.shape[0])[:, None]
    return generated.at[row, tokens].add(counted.astype(jnp.int32), mode="drop")


def _count(paths: Paths, vocab: int) -> Int[Array, "B N V"]:
    """How often each token is on the way to each node."""
    ids = jnp.arange(vocab)
    total = jnp.zeros((*paths.shape[:2], 1), jnp.int32)
    # A sum of comparisons, not a scatter: it becomes a part of the arithmetic around it.
    for depth in range(paths.shape[2]):
        total = total + (paths[:, :, depth, None] == ids)
    return total


# --- parts of the order ------------------------------------------------------------------------


def _add_dry(settings: PathSettings, state: DecodeState, x: Logits, paths: Paths) -> Logits:
    """The DRY penalty: ``multiplier · base^(n − allowed_length)`` for a token that would continue
    a repetition of n tokens, n at least the allowed length (text-generation-webui, pull request
    5677).
    """

    def penalty(tokens, length, row):
        longest = longest_repetitions(tokens, length, row.dry_breakers, x.shape[-1])
        beyond = (longest - row.dry_allowed_length).astype(jnp.float32)
        power = row.dry_multiplier * row.dry_base**beyond
        return jnp.where((longest > 0) & (beyond >= 0), power, 0.0)

    on = settings.dry_multiplier > 0
    return _if_any(on, x, lambda: x - _at_nodes(penalty, settings, state, paths))


def _ban_repeated_ngrams(
    settings: PathSettings, state: DecodeState, x: Logits, paths: Paths
) -> Logits:
    """No n-gram of the text twice, as transformers' ``no_repeat_ngram_size``."""

    def banned(tokens, length, row):
        return repeating_tokens(tokens, length, row.no_repeat_ngram_size, x.shape[-1])

    on = settings.no_repeat_ngram_size > 0
    return _if_any(
        on, x, lambda: jnp.where(_at_nodes(banned, settings, state, paths), probs.NEVER, x)
    )


def _ban_words(settings: PathSettings, state: DecodeState, x: Logits, paths: Paths) -> Logits:
    """No token that completes a banned word, as transformers' ``bad_words_ids``."""

    def banned(tokens, length, row):
        return completing_tokens(tokens, length, row.bad_words, x.shape[-1])

    on = jnp.any(settings.bad_words != NO_TOKEN, axis=(1, 2))
    return _if_any(
        on, x, lambda: jnp.where(_at_nodes(banned, settings, state, paths), probs.NEVER, x)
    )


def _bound_length(settings: PathSettings, state: DecodeState, x: Logits, paths: Paths) -> Logits:
    """No end before ``min_tokens``; likelier ends after the start of a length decay."""
    assert state.counts is not None
    ends = state.counts.ends[:, None]
    written = (state.length - state.prompt_length)[:, None] + _depths(paths)
    too_early = (written < settings.min_tokens[:, None])[..., None]
    x = jnp.where(ends & too_early, probs.NEVER, x)

    past = jnp.maximum(written - settings.decay_start[:, None], 0)
    # Bounded, because nothing may become infinite: inf − inf would be NaN.
    growth = jnp.minimum(settings.decay_factor[:, None] ** past, LARGEST) - 1
    grown = jnp.minimum(x + jnp.abs(x) * growth[..., None], LARGEST)
    # A banned end stays banned: −inf plus |−inf| would be NaN.
    return jnp.where(ends & (x > probs.NEVER), grown, x)


# --- of one node -------------------------------------------------------------------------------


def repeating_tokens(
    tokens: Int[Array, "S"], length: Int[Array, ""], n: Int[Array, ""], vocab: int
) -> Bool[Array, "V"]:
    """Tokens that would complete an n-gram that the first ``length`` tokens have; none if n = 0."""
    at = jnp.arange(tokens.shape[0])

    def goes_on(carry):
        back, same = carry
        return (back < n) & jnp.any(same)  # n may be far beyond the text

    def compare(carry):
        back, same = carry
        return back + 1, same & (jnp.roll(tokens, back) == tokens[length - back])

    # same[i]: the n − 1 tokens before place i are the last n − 1 tokens.
    same = (at >= n - 1) & (at < length) & (n > 0)
    _, same = jax.lax.while_loop(goes_on, compare, (jnp.int32(1), same))
    return jnp.zeros((vocab,), bool).at[jnp.where(same, tokens, vocab)].set(True, mode="drop")


def completing_tokens(
    tokens: Int[Array, "S"], length: Int[Array, ""], words: Int[Array, "W L"], vocab: int
) -> Bool[Array, "V"]:
    """The last token of each word whose other tokens are the last of the first ``length``."""
    size = words.shape[1]
    back = length - size + 1 + jnp.arange(size - 1)
    last = jnp.where(back >= 0, tokens[jnp.maximum(back, 0)], NO_TOKEN)
    before = words[:, :-1]
    same = jnp.all((before == NO_TOKEN) | (before == last), axis=1)
    # As transformers: a word longer than the text is not looked for.
    fits = jnp.sum(words != NO_TOKEN, axis=1) <= length
    place = jnp.where(same & fits & (words[:, -1] != NO_TOKEN), words[:, -1], vocab)
    return jnp.zeros((vocab,), bool).at[place].set(True, mode="drop")


def longest_repetitions(
    tokens: Int[Array, "S"], length: Int[Array, ""], breakers: Int[Array, "K"], vocab: int
) -> Int[Array, "V"]:
    """Per token, the most tokens before an earlier place of it that are the last of the text.

    A breaker ends a repetition, and is none itself. At most LONGEST_REPETITION.
    """
    at = jnp.arange(tokens.shape[0])
    is_breaker = jnp.any(tokens[:, None] == breakers, axis=1)

    def goes_on(carry):
        back, same, _ = carry
        return jnp.any(same) & (back <= LONGEST_REPETITION)

    def compare(carry):
        back, same, longest = carry
        last = length - back
        same = same & (at >= back) & (jnp.roll(tokens, back) == tokens[last]) & ~is_breaker[last]
        return back + 1, same, longest + same

    start = jnp.int32(1), (at < length) & ~is_breaker, jnp.zeros(at.shape, jnp.int32)
    _, _, longest = jax.lax.while_loop(goes_on, compare, start)
    place = jnp.where(longest > 0, tokens, vocab)
    return jnp.zeros((vocab,), jnp.int32).at[place].max(longest, mode="drop")


# --- helpers -----------------------------------------------------------------------------------


def _at_nodes(
    function: Callable[..., Array], settings: PathSettings, state: DecodeState, paths: Paths
) -> Float[Array, "B N V"]:
    """``function(tokens, length, row_settings)`` at every node, on the text up to the node."""
    room = ((0, 0), (0, paths.shape[2]))
    committed = jnp.pad(state.tokens, room)

    def at_node(committed, length, row, path):
        tokens = jax.lax.dynamic_update_slice(committed, path, (length,))
        return function(tokens, length + jnp.sum(path != NO_TOKEN), row)

    of_row = jax.vmap(at_node, in_axes=(None, None, None, 0))
    return jax.vmap(of_row)(committed, state.length, settings, paths)


def _if_any(on: Bool[Array, "B"], x: Logits, changed: Callable[[], Logits]) -> Logits:
    """``changed()`` if any row is ``on``; it must leave the other rows as they are."""
    return jax.lax.cond(jnp.any(on), changed, lambda: x)


def _depths(paths: Paths) -> Int[Array, "B N"]:
    return jnp.sum(paths != NO_TOKEN, axis=-1, dtype=jnp.int32)


def _per_row(values: Float[Array, "B"]) -> Float[Array, "B 1 1"]:
    return values[:, None, None]
