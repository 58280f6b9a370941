"""The ``length`` reward: completions with a number of tokens in a range."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax._util.arguments import COUNT, validate_fields
from specjax._util.checks import Check
from specjax.rewards.protocol import DeviceReward


@dataclasses.dataclass(frozen=True)
class Length:
    """1 for completions of ``low`` to ``high`` tokens.

    A completion of n tokens scores ``n / low`` below that and ``high / n`` above it. n includes the
    end of sequence.
    """

    low: int
    high: int
    name = "length"
    bounds = (0.0, 1.0)
    full = 1.0

    def __post_init__(self):
        validate_fields(self, low=Check(int, low=0), high=COUNT)

    def check(self, tokenizer, constraints):
        """Every completion has a length."""

    def score(self, sample):
        """The score of one completion, by its number of tokens."""
        # float32, as on the device: a threshold must give the same answer in both places.
        count = len(sample.tokens)
        if count < self.low:
            return float(np.float32(count) / np.float32(self.low))
        return float(min(np.float32(1), np.float32(self.high) / np.float32(max(count, 1))))

    def on_device(self, tokenizer, constraints):
        """A count of tokens on the device."""
        shared = {"low": np.int32(self.low), "high": np.int32(self.high)}
        return DeviceReward(Counting(), shared, np.zeros((len(constraints), 0), np.int32))


@dataclasses.dataclass(frozen=True)
class Counting:
    """:class:`Length` on the device: it counts tokens."""

    def init(self, shared, own):
        return jnp.int32(0)

    def advance(self, shared, own, carry, token):
        return carry + 1

    def value(self, shared, own, carry):
        n = carry.astype(jnp.float32)
        below = n / jnp.maximum(shared["low"], 1).astype(jnp.float32)
        above = jnp.minimum(1.0, shared["high"].astype(jnp.float32) / jnp.maximum(n, 1))
        return jnp.where(carry < shared["low"], below, above)
