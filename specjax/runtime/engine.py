"""The engine, which is a method bound to its models, and the requests that it decodes.

Axis legend: B rows of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from specjax.core.mesh import DATA
from specjax.core.protocols import Method
from specjax.core.sampling import Sampling, kinds_of, stacked
from specjax.core.types import Inputs
from specjax.draft.auto_length import COSTS, AutoLength
from specjax.lm import LM
from specjax.models.cache import ring_capacity
from specjax.rewards import RewardScorer
from specjax.runtime.grammar_rounds import check_method
from specjax.runtime.grammar_stack import CLASSES, GRAMMARS, STATES
from specjax.text.automaton import Automaton
from specjax.text.grammar import Matcher, make_automaton, make_matcher
from specjax.text.tokenizer import Tokenizer

TABLES = "grammar tables"  # the kind of settings that a grammar as a table is


@dataclasses.dataclass(frozen=True)
class Engine:
    """A method bound to its models: what all requests of a job share."""

    target: LM
    draft: LM | None
    method: Method
    settings: Mapping[str, float | tuple[float, ...]]  # options that rounds read as arrays
    scorer: RewardScorer | None = None  # scores completions; None without a reward

    def inputs(self, sampling: Sampling, batch: int, cases: Sequence[int] = ()) -> Inputs:
        """Models and settings as a round reads them, for ``batch`` rows with one sampling.

        ``cases`` are the rows' ``request_id``, by which a reward knows them.
        """
        settings = dict(self.settings)
        if isinstance(self.method, AutoLength):
            # Equal costs, until they are measured.
            settings.setdefault(COSTS, (1.0,) * len(self.method.forms))
        inputs = Inputs.of(self.target, self.draft, sampling, batch, settings)
        if self.scorer:
            inputs = inputs.replace(reward=self.scorer.rows(cases))
        return inputs

    def inputs_for(
        self, requests: Sequence[Request], sampling: Sampling, like: Inputs | None = None
    ) -> Inputs:
        """What rounds of these requests read; ``sampling`` is for those without their own.

        It has the kinds of sampling settings that ``like`` has, used or not: the program for them
        is compiled already.
        """
        cases = [request.request_id for request in requests]
        inputs = self.inputs(sampling, len(requests), cases)
        if not any(request.sampling for request in requests):
            return inputs
        rows = [request.sampling or sampling for request in requests]
        warp = stacked(rows, None if like is None else like.warp)
        return inputs.replace(warp=warp)

    def matcher(self, sampling: Sampling) -> Matcher:
        """The grammar of a sampling, at its beginning.

        Raises:
          OptionError, PairError: the grammar cannot be used with this model and method.
        """
        check_method(self.method)
        return make_matcher(*self._grammar(sampling))

    def automaton(self, sampling: Sampling) -> Automaton | None:
        """The grammar of a sampling as a table; None: there is no grammar, or it is no small one.

        Raises:
          OptionError, PairError: as :meth:`matcher`.
        """
        if not sampling.grammar:
            return None
        check_method(self.method)
        return make_automaton(*self._grammar(sampling))

    def kinds(self, sampling: Sampling) -> frozenset[str]:
        """As :attr:`Sampling.kinds`, with ``tables`` if the grammar is a table.

        Grammars that the host follows are not counted.
        """
        tables = {TABLES} if self.automaton(sampling) is not None else set()
        return sampling.kinds | tables

    def _grammar(self, sampling: Sampling) -> tuple[str, Tokenizer | None, int, tuple[int, ...]]:
        """A grammar, and the tokens that may spell and end it."""
        target = self.target
        eos_ids = (*target.eos_ids, *sampling.stop_token_ids)
        return sampling.grammar, target.tokenizer, target.config.vocab_size, eos_ids

    def check_sampling(self, sampling: Sampling) -> None:
        """Refuses a sampling that the method or the model cannot have.

        Raises:
          OptionError, PairError: one line says why.
        """
        sampling.check_vocabulary(self.target.config.vocab_size)
        self.method.check_sampling(sampling)
        if sampling.grammar:
            self.automaton(sampling)  # which takes a second the first time

    def inputs_depend_on(self, requests: Sequence[Request]) -> bool:
        """Whether :meth:`inputs_for` differs from request to request.

        It does if requests have a sampling of their own, or if a reward has data for each.
        """
        if self.scorer is not None and self.scorer.data is not None:
            return True
        return any(request.sampling for request in requests)

    @property
    def auto_length(self) -> bool:
        """Whether the method chooses its draft length by costs."""
        return isinstance(self.method, AutoLength)

    @property
    def smallest_ring(self) -> int | None:
        """Cache positions of the shortest sliding-window layer; None without such a layer."""
        models = [self.target]
        if self.draft:
            models.append(self.draft)
        windows = [window for model in models for window in model.config.windows if window]
        return ring_capacity(min(windows, default=None))

    @property
    def data_parallel_size(self) -> int:
        """Devices that the rows are split over: the size of the mesh's data axis."""
        if self.target.mesh is None:
            return 1
        return self.target.mesh.shape[DATA]

    def chunk_size(self, longest: int, rows: int) -> int:
        """Tokens per prefill pass of ``rows`` prompts, of which the longest has ``longest``.

        If passes are padded to ``pass_width`` tokens, a prefill chunk is never smaller than that.
        """
        return self.target.net.chunk_size(longest, rows // self.data_parallel_size)

    def batch_invariant(self, rows: int) -> bool:
        """Whether a token's bits must not depend on what else a batch of ``rows`` rows decodes.

        That is what padded passes are for. A GPU's product of other shape may sum in another order,
        so each prompt is then prefilled in passes of its own, whenever its turn comes.
        """
        return self.target.net.padded_width(rows // self.data_parallel_size) > 1


@dataclasses.dataclass(frozen=True)
class Request:
    """One sample of one prompt.

    ``request_id`` is the request's number in the job. Rewards read ``prompt``, its text, and
    ``constraints``. ``sampling`` and ``stop``, if not None, replace those of the job.
    """

    tokens: np.ndarray  # int32 ids of the prompt
    budget: int  # most new tokens
    key: jax.Array  # of its own random numbers: its tokens do not depend on the batch slot
    request_id: int = 0
    prompt: str = ""
    constraints: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    sampling: Sampling | None = None
    stop: Sequence[str] | None = None

    def differs_only_in_key(self, other: Request) -> bool:
        """Whether both are samples of one prompt, with one budget and sampling."""
        if self.tokens is not other.tokens or self.constraints is not other.constraints:
            return False
        return self.budget == other.budget and self.sampling == other.sampling


def batch_kinds(inputs: Inputs) -> frozenset[str]:
    """The kinds (:meth:`Engine.kinds`) that the programs of a batch have.

    They are those of its requests, and of earlier ones since the batch was made.
    """
    kinds = kinds_of(inputs.warp)
    if inputs.grammars is None:
        return kinds
    states, classes = inputs.grammars.next_state.shape
    grammars = inputs.grammars.token_class.shape[0]
    if (states, classes, grammars) == (STATES, CLASSES, GRAMMARS):
        return kinds | {TABLES}
    return kinds | {TABLES, f"{TABLES}: {states}, {classes}, {grammars}"}


def stack_keys(requests: Sequence[Request]) -> Key[Array, "B"]:
    """The requests' keys as one array, stacked on the host: XLA takes minutes over thousands."""
    data = np.stack([np.asarray(jax.random.key_data(request.key)) for request in requests])
    return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(requests[0].key))
