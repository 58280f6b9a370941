"""Time cases over prompts.

``BenchSetting`` is what all cases share. ``Result`` is what one case generated, once per repeat.

A case is warmed up before it is timed, so no time includes a compilation. It is warmed up again
after its programs were dropped to make room for those of other cases. Repeats of the cases are
interleaved: if the machine slows down, it slows all of them, and ratios within a repeat stay fair.

Axis legend: R repeats, P prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

import specjax as sj
from infer.bench.cases import Case
from infer.bench.energy import EnergyMeter
from infer.programs import make_room
from infer.rescoring import Prompts
from infer.timing import row_seconds
from infer.uncertainty import Speed
from specjax._util.waiting import waiting
from specjax.core.probs import seed_key
from specjax.registry import METHODS
from specjax.runtime import warmup
from specjax.runtime.engine import Request
from specjax.runtime.generate import PREFIXES, longest_first, make_engine, num_slots


@dataclasses.dataclass
class Result:
    """What a case generated: one generation per repeat, each with its own seed."""

    case: Case
    runs: list[sj.Generation] = dataclasses.field(default_factory=list)
    joules: list[float] = dataclasses.field(default_factory=list)  # per repeat, prefill included

    @property
    def distinct_runs(self) -> list[sj.Generation]:
        """The repeats whose tokens may differ: of greedy decoding only the first."""
        return self.runs[:1] if self.case.mode == "greedy" else self.runs

    @property
    def tokens(self) -> list[np.ndarray]:
        """The first repeat's tokens, one entry per prompt."""
        return self.runs[0].tokens

    def speed(self, whole: bool = False) -> Speed:
        """Tokens and seconds of each repeat's rows, ``[R, P]`` both.

        ``whole`` includes the prefill (:func:`infer.timing.row_seconds`), as a peer's times do.
        """
        size = self.case.batch_size
        tokens = np.array([run.lengths for run in self.runs])
        seconds = np.array([row_seconds(run, size, whole) for run in self.runs])
        return tokens, seconds

    def tokens_per_second(self, whole: bool = False) -> np.ndarray:
        """The speed of each repeat, ``[R]``."""
        tokens, seconds = self.speed(whole)
        return tokens.sum(axis=1) / seconds.sum(axis=1)


@dataclasses.dataclass(frozen=True)
class BenchSetting:
    """What all cases share."""

    target: sj.LM
    draft: sj.LM | None
    prompts: Prompts
    budget: int  # new tokens of a completion, at most
    seed: int = 0  # of the first repeat; each further repeat adds one
    stop: Sequence[str] = ()


def measure(
    setting: BenchSetting,
    cases: Sequence[Case],
    repeats: int,
    after_repeat: Callable[[int], None] = lambda repeat: None,
    meter: EnergyMeter | None = None,
    after_run: Callable[[Case, int, sj.Generation], None] = lambda case, repeat, run: None,
) -> list[Result]:
    """Runs all cases over all prompts, ``repeats`` times, interleaved.

    Args:
      setting: what all cases share.
      cases: what to measure.
      repeats: how often; each repeat has the next seed.
      after_repeat: called with the repeat's number; a peer is timed there.
      meter: reads the energy, if there is one.
      after_run: called with each case, repeat and generation as soon as it is there.

    Returns:
      One result per case, in the order of ``cases``.
    """
    results = [Result(case) for case in cases]
    order = _running_order(cases)
    warm: set[int] = set()
    for repeat in range(repeats):
        seeded = dataclasses.replace(setting, seed=setting.seed + repeat)
        for number in order:
            result = results[number]
            if make_room():
                warm.clear()  # compiled programs were dropped
            if number not in warm:
                case = result.case
                with waiting(f"warming up {case.label}, {case.mode}, batch {case.batch_size}"):
                    warm_up(setting, case)
                warm.add(number)

            # The warmup's energy is not part of the figure.
            before = meter.joules() if meter else 0.0
            result.runs.append(run_case(seeded, result.case))
            if meter:
                result.joules.append(meter.joules() - before)
            after_run(result.case, repeat, result.runs[-1])
        after_repeat(repeat)
    return results


def _running_order(cases: Sequence[Case]) -> list[int]:
    """Numbers of the cases, greedy and sampled ones of a method next to each other.

    They share most compiled programs, which may have to make room for other cases'.
    """
    groups: dict[tuple[int, str], list[int]] = {}
    for number, case in enumerate(cases):
        groups.setdefault((case.batch_size, case.label), []).append(number)
    return [number for group in groups.values() for number in group]


def warm_up(setting: BenchSetting, case: Case) -> None:
    """Compiles every program that the case may run, whenever its rows end."""
    target = setting.target
    greedy = case.mode == "greedy"
    engine = make_engine(target, setting.draft, METHODS[case.method], case.options, greedy)
    engine.check_sampling(case.sampling)

    # A warmup draws no tokens that anybody sees, so all requests may share a key.
    key = seed_key(setting.seed)
    requests = []
    for prompt in map(np.array, setting.prompts):
        most = target.config.max_position - len(prompt)
        requests.append(Request(prompt, min(setting.budget, most), key))

    size = num_slots(target, len(requests), case.batch_size)
    warmup.warm_up(engine, size, case.sampling, longest_first(requests), PREFIXES)


def run_case(setting: BenchSetting, case: Case) -> sj.Generation:
    """Generates every prompt's completion once, with the case's batch size."""
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
