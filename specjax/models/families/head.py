"""The module of an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840).

A head is one decoder layer. For each token it reads the token's embedding and the features of the
token before. Features are the inputs of some of the target's layers, joined into one vector.
So the head drafts from what the target has already computed.

Axis legend: B rows, N tokens, P layers of the target, D hidden size, T the target's hidden size,
V vocabulary, v draft vocabulary.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from specjax.models import sharding
from specjax.models.blocks import MLP, Attend, Attention, Decoder, make_table
from specjax.models.families.head_config import HeadConfig
from specjax.models.layers import NORMS, Linear, linear


class HeadBlock(nnx.Module):
    """A decoder layer whose attention reads token embeddings and features side by side."""

    def __init__(self, cfg: HeadConfig, rngs: nnx.Rngs, fused: bool):
        self.cfg = cfg
        norm = NORMS[cfg.norm]
        d = cfg.hidden_size
        self.attention_norm = norm(d, cfg.norm_eps)
        self.hidden_norm = norm(d, cfg.norm_eps)
        self.attention = Attention(cfg, rngs, fused, input_size=2 * d)
        self.mlp_norm = norm(d, cfg.norm_eps)
        self.mlp = MLP(cfg, rngs, fused)

    def __call__(self, x: Float[Array, "B N D"], features: Float[Array, "B N D"], table, attend):
        normed_features = self.hidden_norm(features)
        inputs = jnp.concatenate([self.attention_norm(x), normed_features], axis=-1)
        residual = normed_features if self.cfg.norm_before_residual else features
        x = residual + self.attention(inputs, table, attend)
        return x + self.mlp(self.mlp_norm(x))


class EagleHead(Decoder):
    """Tokens and features to hidden states ``[B, N, D]``, which are not normed."""

    def __init__(self, cfg: HeadConfig, rngs: nnx.Rngs, fused: bool = False):
        self.cfg = cfg
        norm = NORMS[cfg.norm]
        d = cfg.hidden_size
        joined_size = cfg.parts * cfg.target_size
        # Each module draws from rngs when it is made, so the order fixes the initial weights.
        if cfg.own_embedding:
            self.embed = make_table((cfg.vocab_size, d), ("vocab", "embedding"), rngs)
        self.fc = Linear((d, joined_size), ("hidden", "hidden"), False, cfg.shards, rngs)
        if cfg.norm_before_fc:
            self.input_norm = norm(joined_size, cfg.norm_eps)
        if cfg.fc_norm:
            norms = {str(i): norm(cfg.target_size, cfg.norm_eps) for i in range(cfg.parts)}
            self.fc_norm = nnx.Dict(norms)
        self.layers = nnx.Dict({"0": HeadBlock(cfg, rngs, fused)})
        self.norm = norm(d, cfg.norm_eps)
        self.head = make_table((cfg.draft_size, d), ("vocab", "embedding"), rngs)

    def __call__(
        self,
        tokens: Int[Array, "B N"],
        positions: Int[Array, "B N"],
        attend: Attend,
        remat: bool = False,
        scan: bool = False,
        aux_layers: tuple[int, ...] = (),
        features: Float[Array, "B N D"] | None = None,
        rows: NamedSharding | None = None,
        labels: Float[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B N D"], None]:
        """As :class:`Decoder`; ``features`` are required.

        ``scan``, ``aux_layers`` and ``labels`` are unused.
        """
        assert features is not None, "a head always reads features"
        # The embedding may be the target's, and of another dtype.
        x = self.embedded(tokens, rows).astype(features.dtype)
        table = self.tables(positions)[0]
        attend_here = functools.partial(attend, 0)

        def run(block: HeadBlock, x, features):
            x = sharding.constrain(x, rows)
            features = sharding.constrain(features, rows)
            return sharding.constrain(block(x, features, table, attend_here), rows)

        if remat:
            run = nnx.remat(run)
        return run(self.layers["0"], x, features), None

    def fused_states(self, states: Float[Array, "B N P T"]) -> Float[Array, "B N D"]:
        """The features, from the inputs of P layers of the target."""
        if self.cfg.fc_norm:
            parts = [self.fc_norm[str(i)](states[:, :, i]) for i in range(self.cfg.parts)]
            states = jnp.stack(parts, axis=2)
        joined = states.reshape(*states.shape[:2], -1).astype(self.fc.weight.dtype)
        if self.cfg.norm_before_fc:
            joined = self.input_norm(joined)
        return self.fc(joined)

    def fed_back(self, hidden: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """The next drafted step's features, from this step's hidden states.

        For a drafted token there are no states of the target, so the head reads its own.
        """
        return self.norm(hidden) if self.cfg.norm_output else hidden

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... v"]:
        """Logits over the draft vocabulary, in the model's dtype."""
        logits = linear(self.norm(hidden), self.head[...])
        return sharding.gather_logits(logits, self.cfg.draft_size)
