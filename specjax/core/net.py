"""A model as decoding runs it: one value, and the few ways to run it.

Axis legend: B rows, N new tokens, n of them whose logits are wanted, T tokens above the
committed ones, P auxiliary layers, D size of a hidden state, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.core import vocabulary
from specjax.core.probs import fit_vocabulary, limit_vocabulary
from specjax.models import (
    KVCache,
    ModelConfig,
    forward,
    hidden_states,
    init_cache,
    logits_of,
    splits_tables,
)
from specjax.models.adapters import KEY
from specjax.models.cache import chunk_size

# Tokens that a pass on an accelerator may have at no extra cost. A TPU v5p computes 166 bfloat16
# rows in the time in which it reads the weights, other accelerators more.
FREE_TOKENS = 128


class NetOutput(NamedTuple):
    """What a pass over new tokens gives."""

    logits: Float[Array, "B n V"]  # float32, after the tokens asked for
    cache: KVCache  # with the new tokens
    aux_states: Float[Array, "B N P D"] | None  # inputs of the auxiliary layers; None without any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("params", "adapters"),
    meta_fields=("config", "vocab", "vocab_limit", "pass_width", "cache_dtype"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Net:
    """Params and what is static about them: a pytree whose leaves are the params.

    One jitted loop serves every model of an architecture. Handing a Net to it costs no more than a
    plain dict.

    A pass with a cache is padded to ``pass_width`` tokens per row, unless the batch has so many
    rows that an accelerator would take longer for it (:meth:`padded_width`). The accelerator's
    matrix unit then has enough rows to stream the weights at full speed. And a token's logits do
    not depend on how many tokens are in the pass, not even in bfloat16. So greedy speculative
    decoding equals plain decoding for chains that fit into the width with their root, with at most
    ``FREE_TOKENS // pass_width`` rows. On a CPU the same holds of trees, but not in caches that are
    read block by block, nor in layers whose cache is a ring.
    """

    params: dict
    config: ModelConfig
    vocab: int  # V, ids that the logits are over: for a draft, the target's
    vocab_limit: int  # ids from here on, which no tokenizer knows, have logit −inf
    pass_width: int = 1
    cache_dtype: str | None = None  # int8: keys and values are quantized; None: as the params
    adapters: dict = dataclasses.field(default_factory=dict)  # for passes with adaptive tokens

    def __repr__(self) -> str:
        """One line, without the params."""
        return f"Net({self.config.family}, vocab={self.vocab}, pass_width={self.pass_width})"

    def over(self, target: Net) -> Net:
        """The same model, its logits over the target's ids."""
        limit = min(self.vocab_limit, target.vocab_limit)
        return dataclasses.replace(self, vocab=target.vocab, vocab_limit=limit)

    def cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache."""
        dtype = self.cache_dtype or self.params["embed"].dtype
        return init_cache(self.config, rows, capacity, dtype)

    def prefill_chunk(
        self,
        cache: KVCache,
        tokens: Int[Array, "B N"],
        start: Int[Array, "B"],
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[KVCache, Float[Array, "B N P D"] | None]:
        """The cache with N more tokens of each row's prompt, from position ``start`` on.

        Also returns the inputs of the P layers ``aux_layers`` at these tokens; None without any.
        """
        positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        out = forward(
            self.config, self.params, cache, tokens, positions, start, aux_layers=aux_layers
        )
        return out.cache, out.aux_states

    def chunk_size(self, longest: int, rows: int) -> int:
        """Tokens of each row in a prefill chunk, by the longest prompt of ``rows``.

        If passes are padded to ``pass_width`` tokens, a chunk is never so small that it would be.
        """
        least = 1
        if self.pass_width > 1:
            # The largest power of two that costs an accelerator nothing extra.
            least = 1 << (FREE_TOKENS // rows).bit_length() >> 1
        return chunk_size(longest, rows, least)

    def padded_width(self, rows: int) -> int:
        """Tokens per row that a smaller pass is padded to; 1 if passes are not padded."""
        return self.pass_width if rows * self.pass_width <= FREE_TOKENS else 1

    def logits(
        self,
        cache: KVCache,
        tokens: Int[Array, "B N"],
        start: Int[Array, "B"],
        positions: Int[Array, "B N"] | None = None,
        visible: Bool[Array | np.ndarray, "B N T"] | None = None,
        *,
        base: Int[Array, "B"] | None = None,
        tree_positions: Int[Array, "B T"] | None = None,
        at: Int[Array, "B n"] | None = None,
        aux_layers: tuple[int, ...] = (),
        adaptive: bool = False,
    ) -> NetOutput:
        """One pass over new tokens, which the cache then holds from ``start`` on.

        Args:
          positions, visible, base, tree_positions: of a tree, as
            :func:`specjax.models.forward` takes them. A chain by default.
          at: the tokens whose logits are wanted; all by default.
          aux_layers: the P layers whose inputs at every new token are returned, too.
          adaptive: whether there are adaptive tokens among the new ones. They use the adapters.
        """
        rows, count = tokens.shape
        pass_width = self.padded_width(rows)
        if positions is None:
            positions = start[:, None] + jnp.arange(count, dtype=jnp.int32)
        params = self.params
        if adaptive and self.adapters:
            params = params | {KEY: self.adapters}
        hidden, cache, aux_states = forward(
            self.config,
            params,
            cache,
            tokens,
            positions,
            start,
            visible,
            base=base,
            tree_positions=tree_positions,
            pass_width=pass_width,
            aux_layers=aux_layers,
        )
        if pass_width <= count:
            return NetOutput(self._head(hidden, at), cache, aux_states)
        # The head runs over the padded pass, too: one program for any number of tokens.
        logits = self._head(hidden)[:, :count]
        if at is not None:
            logits = jnp.take_along_axis(logits, at[:, :, None], axis=1)
        if aux_states is not None:
            aux_states = aux_states[:, :count]
        return NetOutput(logits, cache, aux_states)

    def rescore(
        self, tokens: Int[Array, "B T"], at: Int[Array, "B n"] | None = None
    ) -> Float[Array, "B n V"]:
        """float32 logits after the tokens of whole rows, without a cache; ``at`` as above."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        segments = jnp.ones_like(positions)
        hidden = hidden_states(self.config, self.params, tokens, positions, segments).hidden
        return self._head(hidden, at)

    def _head(self, hidden: Float[Array, "B N D"], at: Int[Array, "B n"] | None = None):
        if at is not None:
            hidden = jnp.take_along_axis(hidden, at[:, :, None], axis=1)
        if vocabulary.is_split():
            return self._own_logits(hidden)
        logits = logits_of(self.config, self.params, hidden).astype(jnp.float32)
        return limit_vocabulary(fit_vocabulary(logits, self.vocab), self.vocab_limit)

    def _own_logits(self, hidden: Float[Array, "B N D"]) -> Float[Array, "B N v"]:
        """The logits of this device's share of the target's ids; −inf at those that pad it.

        A model whose own shares are others, such as a draft with another vocabulary, gathers its
        logits first.
        """
        share = vocabulary.share_size(self.vocab)
        has_share = splits_tables(self.config, self.params) and (
            vocabulary.share_size(self.config.vocab_size) == share
        )
        logits = logits_of(self.config, self.params, hidden, own=has_share).astype(jnp.float32)
        if not has_share:
            logits = vocabulary.own_share(fit_vocabulary(logits, self.vocab))
        return limit_vocabulary(logits, min(self.vocab_limit, self.vocab))
