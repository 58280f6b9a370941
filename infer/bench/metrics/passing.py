"""``pass@K``: the chance that one of K completions passes its task's test (Chen et al. 2021).

The tests run in the sandbox of ``--run-tests`` (:mod:`infer.bench.sandbox`), and under its guard.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infer.bench.metrics.protocol import Completion, Drawn, Task
from infer.bench.metrics.settings import Settings
from infer.bench.sandbox import check_tasks, choose_guard, humaneval_program, passing
from infer.uncertainty import Estimate, ratio
from specjax._util.errors import OptionError

FENCE = re.compile(r"```(?:python)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)
DONE = "[DONE]"  # ends a solution of MBPP (Austin et al. 2021, §3)
MOST = 1000  # completions of a prompt


class Passing:
    """pass@k of n completions of which c pass: ``1 − C(n − c, k) / C(n, k)``, the mean over tasks.

    Unbiased (Chen et al. 2021, equation 1). None where a prompt has fewer than k completions:
    greedy decoding has one.
    """

    def __init__(self, k: int, guard: str | None):
        self._k, self._guard = k, guard
        self._key = f"pass_at_{k}"
        self.columns = {self._key: f"pass@{k}"}

    def check(self, prompts: Sequence[Completion]) -> None:
        check_tasks([as_task(prompt.task) for prompt in prompts])

    def measure(self, drawn: Sequence[Drawn]) -> Mapping[str, Estimate]:
        if min(map(len, drawn)) < self._k:
            return {self._key: (None, None)}
        done = [one for prompt in drawn for one in prompt]
        tasks, programs = [as_task(one.task) for one in done], [program_of(one) for one in done]
        passed = iter(passing(tasks, programs, self._guard))
        counts = [(len(prompt), sum(next(passed) for _ in prompt)) for prompt in drawn]
        each = np.array([pass_at_k(n, c, self._k) for n, c in counts])
        return {self._key: ratio(each, np.ones(len(each)))}


def pass_at_k(n: int, c: int, k: int) -> float:
    """``1 − C(n − c, k) / C(n, k)``, as a product: the binomials would overflow."""
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def as_task(task: Task) -> dict[str, Any]:
    """A task in HumanEval's format; MBPP's ``test_list`` becomes a ``check``, and its prompt, which
    is no code, is left out."""
    listed = task.get("test_list")
    if not isinstance(listed, list) or not listed:
        return dict(task)
    if "entry_point" in task and "test" in task:
        return {"prompt": "", "test": task["test"], "entry_point": task["entry_point"]}
    called = re.findall(r"([A-Za-z_]\w*)\s*\(", str(listed[0]))
    defined = re.findall(r"^def (\w+)", str(task.get("code", "")), re.MULTILINE)
    name = next((name for name in called if name in defined), "")
    name = name or next((name for name in called if not hasattr(builtins, name)), "")
    setup = [task.get("test_setup_code") or "", *task.get("test_imports", ())]
    lines = [f"{name} = candidate", *map(str, listed)]
    body = "".join("    " + line.replace("\n", "\n    ") + "\n" for line in lines)
    test = "\n".join([*setup, f"def check(candidate):\n{body}"])
    return {"prompt": "", "test": test, "entry_point": name}


def program_of(one: Completion) -> str:
    """The function that a completion makes: of MBPP's tasks it is the whole of it."""
    if "test_list" not in one.task:
        return humaneval_program(one.task, one.text)
    fenced = FENCE.search(one.text)
    return (fenced[1] if fenced else one.text).partition(DONE)[0] + "\n"


def make(argument: str, settings: Settings) -> Passing:
    """The metric; ``argument`` is k.

    Raises:
      OptionError: no such k, fewer seeds than k, or nothing confines what the models write.
    """
    if not re.fullmatch("[1-9][0-9]{,3}", argument) or int(argument) > MOST:
        raise OptionError(f"--metric pass@{argument}: expected pass@K, K from 1 to {MOST}")
    k = int(argument)
    if settings.repeats < k:
        raise OptionError(
            f"--metric pass@{k} needs {k} completions of a prompt: --repeats {k} or more"
        )
    return Passing(k, choose_guard(settings.unsafe))
