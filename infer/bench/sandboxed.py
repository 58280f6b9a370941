"""One of the two processes that judge a program nobody has read; infer.bench.sandbox starts both.

    python -I sandboxed.py TOLD        TOLD: a JSON object, see infer.bench.sandbox

The worker runs the program and answers calls of its entry point, one JSON text a line. The
checker runs the task's own test, in which the entry point is such a call, and alone can write the
verdict: whoever wants to pass must answer what the test expects. Calls and answers are plain data.
Imports the standard library alone.
"""

import builtins
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

LONGEST = 4 << 20  # bytes of an answer
KINDS: dict[str, Callable[[list], Any]] = {
    **{kind.__name__: kind for kind in (dict, tuple, set, frozenset, bytes, bytearray)},
    "complex": lambda parts: complex(*parts),
    "range": lambda bounds: range(*bounds),
    "iterator": iter,
}


def encode(value: Any) -> Any:
    """Plain data as what JSON can hold. Raises TypeError for anything else."""
    if type(value).__module__ == "numpy" and not getattr(value, "shape", True):
        value = value.item()  # a scalar
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    kinds = (tuple, set, frozenset, bytes, bytearray)
    name = next((kind.__name__ for kind in kinds if isinstance(value, kind)), None)
    if name or isinstance(value, Iterator):
        return {name or "iterator": [encode(item) for item in value]}
    raise TypeError(f"{type(value).__name__} is no plain data")


def decode(value: Any) -> Any:
    """What :func:`encode` was given; subclasses come back as the plain type."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        ((name, items),) = value.items()
        return KINDS[name]([decode(item) for item in items])
    return value


def main() -> None:
    told = json.loads(sys.argv.pop())
    confine = runpy.run_path(os.path.join(os.path.dirname(__file__), "confinement.py"))["confine"]
    sys.set_int_max_str_digits(0)
    task = json.load(sys.stdin) if "calls" in told else None
    streams = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", 0)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    confine(told["limits"], told["landlock"])
    if task is None:
        work(*streams)
    else:
        calls, answers = os.fdopen(told["calls"], "wb", 0), os.fdopen(told["answers"], "rb")
        verdict = check(task, EntryPoint(task["entry_point"], calls, answers))
        streams[1].write(json.dumps(verdict).encode())


# --- the worker ------------------------------------------------------------------------------


def work(calls: IO[bytes], answers: IO[bytes]) -> None:
    """Runs the program of the first line, then answers calls until there are no more."""
    program, name = json.loads(calls.readline())
    # Installed packages are in reach even of isolated Python; ours are none of its business.
    sys.modules.update(dict.fromkeys(("infer", "specjax", "train")))
    space = {"__name__": "__main__"}
    exec(compile(program, "program", "exec"), space)
    answer: list = ["ready"]
    while True:
        answers.write(json.dumps(answer).encode() + b"\n")
        if not (line := calls.readline()):
            return
        answer = attempt(space[name], *decode(json.loads(line)))


def attempt(function: Callable, args: list, named: dict) -> list:
    """What a call gives: a value with the arguments as it leaves them, or an exception."""
    try:
        value = function(*args, **named)
    except Exception as error:
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        return ["raised", kind.__name__, str(error)]
    try:
        return ["returned", encode(value), encode(args)]
    except TypeError:
        return ["returned what is no plain data"]


# --- the checker -----------------------------------------------------------------------------


class EntryPoint:
    """The function under test, in the worker."""

    def __init__(self, name: str, calls: IO[bytes], answers: IO[bytes]):
        self.__name__, self._calls, self._answers = name, calls, answers
        self.fault, self.unjudged = False, ""  # a test that swallows exceptions cannot undo them

    def ask(self, message: list) -> list:
        """Raises ConnectionError where no answer comes, or none that can be read."""
        self.fault, known = True, self.fault
        if known:
            raise ConnectionError("the worker is lost")
        try:
            self._calls.write(json.dumps(message).encode() + b"\n")
            kind, *values = json.loads(self._answers.readline(LONGEST))
            answer = [kind, *map(decode, values)]
        except Exception as error:
            raise ConnectionError("no answer") from error
        self.fault = False
        return answer

    def __call__(self, *args, **named):
        try:
            message = [encode(list(args)), encode(named)]
        except TypeError as error:
            self.unjudged = "the test passes what is no plain data"
            raise ConnectionError(self.unjudged) from error
        match self.ask(message):
            case ["returned", value, list(left)]:
                for arg, after in zip(args, left, strict=False):
                    _leave(arg, after)
                return value
            case ["raised", str(name), str(text)]:
                raise _exception(name, text)
        self.unjudged = "the function returned what is no plain data"
        raise ConnectionError(self.unjudged)


def _leave(arg: Any, after: Any) -> None:
    """Makes an argument what the function made of its copy."""
    if type(arg) is type(after):
        if isinstance(arg, list | bytearray):
            arg[:] = after
        elif isinstance(arg, dict | set):
            arg.clear()
            arg.update(after)


def _exception(name: str, text: str) -> Exception:
    kind = getattr(builtins, name, None)
    try:
        return kind(text) if issubclass(kind, Exception) else Exception(text)
    except TypeError:  # more arguments than a text
        return Exception(text)


def check(task: Mapping[str, str], entry_point: EntryPoint) -> dict:
    """Runs ``task``'s ``test``, after its ``helpers``, on the function of its ``program``."""
    space: dict = {"__name__": "__main__"}
    try:
        exec(compile(task["helpers"], "prompt", "exec"), space)
    except Exception as error:
        entry_point.unjudged = f"the prompt's own text: {error!r}"
    ended = False
    try:
        if entry_point.ask([task["program"], task["entry_point"]]) == ["ready"]:
            space[task["entry_point"]] = entry_point
            exec(compile(task["test"], "test", "exec"), space)
            space["check"](entry_point)
            ended = True  # an exit, even with code 0, never comes here
    except BaseException:
        pass
    passed = ended and not entry_point.fault and not entry_point.unjudged
    return {"passed": passed, "unjudged": entry_point.unjudged[:200]}


if __name__ == "__main__":
    main()
