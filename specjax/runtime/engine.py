"""A method bound to its models, and what it is asked for: rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from specjax.core.mesh import DATA
from specjax.core.net import FREE_TOKENS
from specjax.core.protocols import Method
from specjax.core.types import Inputs
from specjax.core.warp import Sampling, stacked
from specjax.draft.auto_length import COSTS, AutoLength
from specjax.lm import LM
from specjax.models.cache import chunk_size as prefill_chunk_size
from specjax.models.cache import ring_capacity
from specjax.rewards import Judge


@dataclasses.dataclass(frozen=True)
class Engine:
    """A method bound to its models: what every batch of a job shares."""

    target: LM
    draft: LM | None
    method: Method
    settings: dict[str, float | tuple[float, ...]]
    judge: Judge | None = None

    def inputs(self, sampling: Sampling, batch: int, cases: Sequence[int] = ()) -> Inputs:
        """Params and settings as the step reads them; ``cases`` are the rows' numbers."""
        settings = dict(self.settings)
        if self.auto_length:
            settings.setdefault(COSTS, (1.0,) * len(self.method.forms))
        inputs = Inputs.of(self.target, self.draft, sampling, batch, settings)
        if self.judge:
            inputs = inputs.replace(reward=self.judge.rows(cases))
        return inputs

    def inputs_of(self, rows: Sequence[Request], sampling: Sampling) -> Inputs:
        """What rounds of these rows read; ``sampling`` is of those that have none of their own."""
        inputs = self.inputs(sampling, len(rows), [row.request_id for row in rows])
        if not any(row.sampling for row in rows):
            return inputs
        return inputs.replace(warp=stacked([row.sampling or sampling for row in rows]))

    @property
    def auto_length(self) -> bool:
        """Whether the method sizes its drafts by costs."""
        return isinstance(self.method, AutoLength)

    def tells_apart(self, rows: Sequence[Request]) -> bool:
        """Whether what rounds read depends on the rows: their own sampling, or a reward's data."""
        guided = self.judge is not None and self.judge.data is not None
        return guided or any(row.sampling for row in rows)

    @property
    def ring(self) -> int | None:
        """The fewest positions of a layer that sees a window; None where none does."""
        models = (self.target, self.draft) if self.draft else (self.target,)
        windows = [window for model in models for window in model.config.windows if window]
        return ring_capacity(min(windows, default=None))

    @property
    def shares(self) -> int:
        """Devices that the rows are split over."""
        return 1 if self.target.mesh is None else self.target.mesh.shape[DATA]

    def chunk_size(self, longest: int, rows: int) -> int:
        """Tokens per prefill pass of ``rows``, by their longest prompt.

        Where narrow passes are of one width, a prompt's pieces are none of them.
        """
        rows //= self.shares
        least = FREE_TOKENS // rows if self.target.pass_width > 1 else 1
        return prefill_chunk_size(longest, rows, 1 << least.bit_length() >> 1)


@dataclasses.dataclass(frozen=True)
class Request:
    """One sample of one prompt. ``request_id`` is the row's number in the job; ``prompt`` (its
    text) and ``constraints`` are what rewards read. ``sampling`` and ``stop`` are the row's own
    where it has some."""

    tokens: np.ndarray
    budget: int
    key: jax.Array
    request_id: int = 0
    prompt: str = ""
    constraints: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    sampling: Sampling | None = None
    stop: Sequence[str] | None = None

    def repeats(self, other: Request) -> bool:
        """Whether the two are samples of one prompt: nothing but their keys differs."""
        same = self.tokens is other.tokens and self.constraints is other.constraints
        return same and (self.budget, self.sampling) == (other.budget, other.sampling)


def keys_of(rows: Sequence[Request]) -> Key[Array, "B"]:
    """The rows' keys as one array; stacked on the host, for XLA takes minutes over thousands."""
    data = np.stack([np.asarray(jax.random.key_data(row.key)) for row in rows])
    return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(rows[0].key))
