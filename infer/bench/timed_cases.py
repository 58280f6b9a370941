"""Cases timed over prompts.

A case is warmed up before it is timed, so no time holds a compilation; again where its programs had
to make room for those of others. Repeats of the cases are interleaved: a machine that slows down
slows all of them, and ratios of one repeat stay fair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

import specjax as sj
from infer.bench.cases import Case
from infer.bench.energy import EnergyMeter
from infer.programs import make_room
from infer.rescoring import Prompts
from infer.timing import row_seconds
from infer.uncertainty import Speed
from specjax.registry import METHODS
from specjax.runtime import warmup
from specjax.runtime.engine import Request
from specjax.runtime.generate import PREFIXES, in_turn, make_engine, num_slots


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
        """Tokens and seconds of each repeat's rows (:func:`infer.timing.row_seconds`); ``whole``:
        prefill included, what a peer is held against."""
        size = self.case.batch_size
        return (
            np.array([run.lengths for run in self.runs]),
            np.array([row_seconds(run, size, whole) for run in self.runs]),
        )

    def tokens_per_second(self, whole: bool = False) -> np.ndarray:
        """Of each repeat."""
        tokens, seconds = self.speed(whole)
        return tokens.sum(axis=1) / seconds.sum(axis=1)


@dataclasses.dataclass(frozen=True)
class BenchSetting:
    """What all cases share."""

    target: sj.LM
    draft: sj.LM | None
    prompts: Prompts
    budget: int
    seed: int = 0  # of the first repeat; every one has the next
    stop: Sequence[str] = ()


def measure(
    setting: BenchSetting,
    cases: Sequence[Case],
    repeats: int,
    between: Callable[[int], None] = lambda repeat: None,
    meter: EnergyMeter | None = None,
) -> list[Result]:
    """All cases over all prompts, ``repeats`` times in turn.

    ``between(repeat)`` runs once per repeat: a peer's turn. ``meter`` reads the energy.
    """
    results, warm = [Result(case) for case in cases], set()
    # Greedy and sampled cases share most programs, and follow each other while these are there.
    kin = [(case.batch_size, case.label) for case in cases]
    order = sorted(range(len(cases)), key=lambda number: kin.index(kin[number]))
    for repeat in range(repeats):
        now = dataclasses.replace(setting, seed=setting.seed + repeat)
        for number in order:
            result = results[number]
            if make_room():
                warm.clear()
            if number not in warm:
                warm_up(setting, result.case)
                warm.add(number)
            before = meter.joules() if meter else 0.0
            result.runs.append(run_case(now, result.case))
            if meter:
                result.joules.append(meter.joules() - before)
        between(repeat)
    return results


def warm_up(setting: BenchSetting, case: Case) -> None:
    """Compiles all that the case may run, whenever its rows end."""
    target, draft, most = setting.target, setting.draft, setting.target.config.max_position
    spec, greedy = METHODS[case.method], case.mode == "greedy"
    engine = make_engine(target, draft, spec, case.options, greedy)
    key = jax.random.key(setting.seed)
    rows = [
        Request(p, min(setting.budget, most - len(p)), key) for p in map(np.array, setting.prompts)
    ]
    size = num_slots(target, len(rows), case.batch_size)
    warmup.warm_up(engine, size, case.sampling, in_turn(rows), PREFIXES)


def run_case(setting: BenchSetting, case: Case) -> sj.Generation:
    """Every prompt once, the case's number of rows in flight."""
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
        stop=setting.stop,
    )
