"""Worker or checker: the two processes that judge an untrusted program.

    python -I sandboxed.py CONFIG      CONFIG: a JSON object, see infer.bench.sandbox

The worker runs the program and answers calls of its entry point, one JSON text per line. The
checker runs the task's own test, in which the entry point is such a call. Only the checker can
write the verdict: to pass, a program must answer what the test expects. Calls and answers are
plain data. This file imports only the standard library.
"""

import builtins
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

MAX_ANSWER = 4 << 20  # bytes
MAX_REASON = 200  # characters of a verdict's reason
# How a value is made again, by the name of its type. JSON itself has the other types.
DECODERS: dict[str, Callable[[list], Any]] = {
    "dict": dict,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "bytes": bytes,
    "bytearray": bytearray,
    "complex": lambda parts: complex(*parts),
    "range": lambda bounds: range(*bounds),
    "iterator": iter,
}


def encode(value: Any) -> Any:
    """Plain data in a form that JSON has. Raises TypeError for anything else."""
    if type(value).__module__ == "numpy" and not getattr(value, "shape", True):
        value = value.item()  # a scalar of NumPy
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
    for kind in (tuple, set, frozenset, bytes, bytearray):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item) for item in value]}
    if isinstance(value, Iterator):
        return {"iterator": [encode(item) for item in value]}
    raise TypeError(f"{type(value).__name__} is not plain data")


def decode(value: Any) -> Any:
    """The value that :func:`encode` was given; of a subclass, as the plain type."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        ((name, items),) = value.items()
        return DECODERS[name]([decode(item) for item in items])
    return value


def main() -> None:
    """Runs as the checker if the configuration has pipes to a worker, else as the worker."""
    config = json.loads(sys.argv.pop())
    confine = runpy.run_path(os.path.join(os.path.dirname(__file__), "confinement.py"))["confine"]
    sys.set_int_max_str_digits(0)
    is_checker = "calls" in config
    task = json.load(sys.stdin) if is_checker else None

    # Move the pipes away from stdin and stdout, which the program could read and write.
    received = os.fdopen(os.dup(0), "rb")
    sent = os.fdopen(os.dup(1), "wb", 0)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)

    confine(config["limits"], config["landlock"])
    if not is_checker:
        work(received, sent)
        return
    calls = os.fdopen(config["calls"], "wb", 0)
    answers = os.fdopen(config["answers"], "rb")
    verdict = check(task, EntryPoint(task["entry_point"], calls, answers))
    sent.write(json.dumps(verdict).encode())


# --- the worker ------------------------------------------------------------------------------


def work(calls: IO[bytes], answers: IO[bytes]) -> None:
    """Runs the program of the first line, then answers calls until there are no more."""
    program, name = json.loads(calls.readline())
    # Even isolated Python finds installed packages. Block ours: they could read the test.
    sys.modules.update(dict.fromkeys(("infer", "specjax", "train")))
    namespace = {"__name__": "__main__"}
    exec(compile(program, "program", "exec"), namespace)
    answer: list = ["ready"]
    while True:
        answers.write(json.dumps(answer).encode() + b"\n")
        line = calls.readline()
        if not line:
            return
        args, named = decode(json.loads(line))
        answer = attempt(namespace[name], args, named)


def attempt(function: Callable, args: list, named: dict) -> list:
    """The answer to a call: its value and the arguments as it left them, or its exception."""
    try:
        value = function(*args, **named)
    except Exception as error:
        # The checker does not have the program's own classes: name the nearest built-in one.
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        return ["raised", kind.__name__, str(error)]
    try:
        return ["returned", encode(value), encode(args)]
    except TypeError:
        return ["returned no plain data"]


# --- the checker -----------------------------------------------------------------------------


class EntryPoint:
    """The function under test, in the checker: calling it asks the worker.

    ``fault`` and ``unjudged`` stay set even if a test swallows the exception that came with them.
    """

    def __init__(self, name: str, calls: IO[bytes], answers: IO[bytes]):
        self.__name__ = name
        self._calls = calls
        self._answers = answers
        self.fault = False  # the worker did not answer
        self.unjudged = ""  # why no verdict is possible

    def ask(self, message: list) -> list:
        """The worker's answer. Raises ConnectionError if there is none that can be read."""
        if self.fault:
            raise ConnectionError("the worker is lost")
        # Set before the answer is known: no exception, even KeyboardInterrupt, may leave it unset.
        self.fault = True
        try:
            self._calls.write(json.dumps(message).encode() + b"\n")
            kind, *values = json.loads(self._answers.readline(MAX_ANSWER))
            answer = [kind, *map(decode, values)]
        except Exception as error:
            raise ConnectionError("no answer") from error
        self.fault = False
        return answer

    def __call__(self, *args, **named):
        try:
            message = [encode(list(args)), encode(named)]
        except TypeError as error:
            self.unjudged = "the test passes a value that is not plain data"
            raise ConnectionError(self.unjudged) from error
        match self.ask(message):
            case ["returned", value, list(args_after)]:
                for arg, after in zip(args, args_after, strict=False):
                    _update(arg, after)
                return value
            case ["raised", str(name), str(text)]:
                raise _exception(name, text)
        self.unjudged = "the function returned a value that is not plain data"
        raise ConnectionError(self.unjudged)


def _update(arg: Any, after: Any) -> None:
    """Changes an argument in place, as the function changed its copy."""
    if type(arg) is type(after):
        if isinstance(arg, list | bytearray):
            arg[:] = after
        elif isinstance(arg, dict | set):
            arg.clear()
            arg.update(after)


def _exception(name: str, text: str) -> Exception:
    """The built-in exception of that name, or a plain one if it cannot be made from a text."""
    kind = getattr(builtins, name, None)
    try:
        if issubclass(kind, Exception):
            return kind(text)
    except TypeError:  # it is no class, or takes other arguments than a text
        pass
    return Exception(text)


def check(task: Mapping[str, str], entry_point: EntryPoint) -> dict:
    """Runs the task's ``helpers`` and ``test`` here, with its ``program`` in the worker."""
    namespace: dict = {"__name__": "__main__"}
    try:
        exec(compile(task["helpers"], "prompt", "exec"), namespace)
    except Exception as error:
        entry_point.unjudged = f"the prompt's own text: {error!r}"

    ended = False
    try:
        if entry_point.ask([task["program"], task["entry_point"]]) == ["ready"]:
            namespace[task["entry_point"]] = entry_point
            exec(compile(task["test"], "test", "exec"), namespace)
            namespace["check"](entry_point)
            ended = True  # not reached by a test that exits, even with code 0
    except BaseException:
        pass
    passed = ended and not entry_point.fault and not entry_point.unjudged
    return {"passed": passed, "unjudged": entry_point.unjudged[:MAX_REASON]}


if __name__ == "__main__":
    main()
