"""Cases timed over prompts.

Everything is warmed up first, so no time holds a compilation. Repeats of the cases are
interleaved: a machine that slows down slows all of them, and ratios of one repeat stay fair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

import specjax as sj
from infer.bench.cases import Case
from infer.bench.energy import Meter
from infer.bench.rescoring import Prompts
from infer.bench.uncertainty import Speed
from infer.timing import batch_times
from specjax.decode import first_slots
from specjax.engine import NO_EOS
from specjax.generate import make_engine, split_rows
from specjax.methods import METHODS


@dataclasses.dataclass
class Result:
    """What a case gave: one generation per repeat, each of another seed."""

    case: Case
    runs: list[sj.Generation] = dataclasses.field(default_factory=list)
    joules: list[float] = dataclasses.field(default_factory=list)  # prefill included

    @property
    def drawn(self) -> list[sj.Generation]:
        """The repeats that say something of the tokens: the seed changes no greedy one."""
        return self.runs[:1] if self.case.mode == "greedy" else self.runs

    @property
    def tokens(self) -> list[np.ndarray]:
        """The first repeat's tokens, one entry per prompt."""
        return self.runs[0].tokens

    def speed(self, whole: bool = False) -> Speed:
        """Tokens and seconds of each repeat's batches; ``whole``: prefill included, what a peer is
        held against."""
        times = [batch_times(run) for run in self.runs]
        return (
            np.array([tokens for tokens, *_ in times]),
            np.array([prefill * whole + decoding for _, prefill, decoding in times]),
        )

    def tokens_per_second(self, whole: bool = False) -> np.ndarray:
        """Of each repeat."""
        tokens, seconds = self.speed(whole)
        return tokens.sum(axis=1) / seconds.sum(axis=1)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all cases share."""

    target: sj.LM
    draft: sj.LM | None
    prompts: Prompts
    budget: int
    seed: int = 0  # of the first repeat; every one has the next


def measure(
    setting: Setting,
    cases: Sequence[Case],
    repeats: int,
    between: Callable[[int], None] = lambda repeat: None,
    meter: Meter | None = None,
) -> list[Result]:
    """All cases over all prompts, ``repeats`` times in turn.

    ``between(repeat)`` runs once per repeat: a peer's turn. ``meter`` reads the energy.
    """
    for case in cases:
        warm_up(setting, case)
    results = [Result(case) for case in cases]
    for repeat in range(repeats):
        now = dataclasses.replace(setting, seed=setting.seed + repeat)
        for result in results:
            before = meter.joules() if meter else 0.0
            result.runs.append(run_case(now, result.case))
            if meter:
                result.joules.append(meter.joules() - before)
        between(repeat)
    return results


def warm_up(setting: Setting, case: Case) -> None:
    """Compiles what the case will run: one batch from each number of slots that any starts with.

    It is the longest such batch, to the end of its budget, whatever it says: no other one reaches
    slots that it has not.
    """
    target, draft, prompts = setting.target, setting.draft, setting.prompts
    spec, greedy = METHODS[case.method], case.mode == "greedy"
    engine = make_engine(target, draft, spec, case.options, greedy)
    lengths = [len(prompt) for prompt in prompts]
    size, batches = split_rows(target, lengths, case.batch_size)
    longest = {}
    for mates in batches:  # in the order of their lengths
        tokens = lengths[mates[-1]]
        chunk = engine.chunk(tokens, size)
        budget = min(setting.budget, target.config.max_position - tokens)
        longest[chunk, first_slots(engine.method, tokens, budget, chunk)] = prompts[mates[-1]]
    endless = dataclasses.replace(target, eos_ids=(NO_EOS,) * len(target.eos_ids))
    for prompt in longest.values():
        run_case(dataclasses.replace(setting, target=endless, prompts=[prompt] * size), case)


def run_case(setting: Setting, case: Case) -> sj.Generation:
    """Every prompt once. Prompts go in batches of the case's size."""
    return sj.generate(
        setting.target,
        setting.prompts,
        method=case.method,
        draft=setting.draft,
        options=case.options,
        sampling=case.sampling,
        max_new_tokens=setting.budget,
        batch_size=case.batch_size,
        seed=setting.seed,
    )
