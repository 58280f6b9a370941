"""``pass@K``: the chance that one of K completions passes its task's test (Chen et al. 2021).

The tests run in the sandbox of ``--run-tests`` (:mod:`infer.bench.sandbox`), under its guard.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infer.bench.metrics.protocol import Completion, Completions, Task
from infer.bench.metrics.settings import Settings
from infer.bench.sandbox import check_tasks, choose_guard, humaneval_program, passing
from infer.uncertainty import Estimate, mean
from specjax._util.errors import OptionError

FENCE = re.compile(r"```(?:python)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)
DONE = "[DONE]"  # ends a solution of MBPP (Austin et al. 2021, §3)
MAX_K = 1000


class Passing:
    """pass@k of n completions of which c pass: ``1 − C(n − c, k) / C(n, k)``, the mean over tasks.

    It is unbiased (Chen et al. 2021, equation 1). It is None if a prompt has fewer than k
    completions. Greedy decoding has only one.
    """

    def __init__(self, k: int, guard: str | None):
        self._k = k
        self._guard = guard
        self._key = f"pass_at_{k}"
        self.columns = {self._key: f"pass@{k}"}

    def check(self, prompts: Sequence[Completion]) -> None:
        check_tasks([as_task(prompt.task) for prompt in prompts])

    def measure(self, by_prompt: Sequence[Completions]) -> Mapping[str, Estimate]:
        if min(map(len, by_prompt)) < self._k:
            return {self._key: (None, None)}
        completions = [one for prompt in by_prompt for one in prompt]
        tasks = [as_task(one.task) for one in completions]
        programs = [program_of(one) for one in completions]
        passed = iter(passing(tasks, programs, self._guard))
        values = []
        for prompt in by_prompt:
            num_passed = sum(next(passed) for _ in prompt)
            values.append(pass_at_k(len(prompt), num_passed, self._k))
        return {self._key: mean(np.array(values))}


def pass_at_k(n: int, c: int, k: int) -> float:
    """``1 − C(n − c, k) / C(n, k)``, as a product: the binomials would overflow."""
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def as_task(task: Task) -> dict[str, Any]:
    """A task in HumanEval's format.

    MBPP's ``test_list`` becomes a ``check``. Its prompt is not code, and is left out.
    """
    listed = task.get("test_list")
    if not isinstance(listed, list) or not listed:
        return dict(task)
    if "entry_point" in task and "test" in task:
        return {"prompt": "", "test": task["test"], "entry_point": task["entry_point"]}

    name = _tested_function(str(listed[0]), str(task.get("code", "")))
    setup = [task.get("test_setup_code") or "", *task.get("test_imports", ())]
    lines = [f"{name} = candidate", *map(str, listed)]
    body = "".join("    " + line.replace("\n", "\n    ") + "\n" for line in lines)
    test = "\n".join([*setup, f"def check(candidate):\n{body}"])
    return {"prompt": "", "test": test, "entry_point": name}


def _tested_function(assertion: str, solution: str) -> str:
    """The first function that an assertion calls and the solution defines.

    If it defines none of them: the first that is no builtin, or "".
    """
    called = re.findall(r"([A-Za-z_]\w*)\s*\(", assertion)
    defined = re.findall(r"^def (\w+)", solution, re.MULTILINE)
    for name in called:
        if name in defined:
            return name
    for name in called:
        if not hasattr(builtins, name):
            return name
    return ""


def program_of(one: Completion) -> str:
    """The program that a completion makes; for MBPP's tasks it is the whole function."""
    if "test_list" not in one.task:
        return humaneval_program(one.task, one.text)
    fenced = FENCE.search(one.text)
    text = fenced[1] if fenced else one.text
    return text.partition(DONE)[0] + "\n"


def make(argument: str, settings: Settings) -> Passing:
    """The metric; ``argument`` is k.

    Raises:
      OptionError: there is no such k, fewer seeds than k, or no guard for what the models write.
    """
    if not re.fullmatch("[1-9][0-9]{,3}", argument) or int(argument) > MAX_K:
        raise OptionError(f"--metric pass@{argument}: expected pass@K, K from 1 to {MAX_K}")
    k = int(argument)
    if settings.repeats < k:
        raise OptionError(
            f"--metric pass@{k} needs {k} completions of a prompt: --repeats {k} or more"
        )
    return Passing(k, choose_guard(settings.unsafe))
