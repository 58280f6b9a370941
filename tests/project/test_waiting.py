"""The line that says what a program does while nothing else is shown."""

import io
import sys

import jax
import jax.monitoring

import specjax as sj
from specjax._util import steps
from specjax._util.waiting import COMPILED, LOWERED, WaitMessage, waiting


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch):
    """A terminal in the place of stderr, with all that is written to it."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


def shown(message):
    """The texts of the line as it stands."""
    (task,) = message._progress.tasks
    return task.description, task.completed, task.total


def test_layers_are_counted(monkeypatch):
    screen = terminal(monkeypatch)
    with waiting("loading it"):
        sj.load("demo-draft")
    layers = sj.load("demo-draft").config.num_layers
    assert "loading it" in screen.getvalue() and f"{layers}/{layers}" in screen.getvalue()


def test_jax_still_tells_of_large_programs():
    """These are JAX's own names: another version may have others."""
    told = {}

    def listen(event, duration_secs, **values):
        told[event] = values.get("fun_name")

    @jax.jit
    def fresh(x):
        return x * 3 + 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        fresh(1.5).block_until_ready()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert "fresh" in told[LOWERED] and "fresh" in told[COMPILED]


def test_a_compiled_program_covers_what_is_shown(monkeypatch):
    terminal(monkeypatch)
    message = WaitMessage(False, "decoding")
    tell = jax.monitoring.record_event_duration_secs
    try:
        steps.tell(steps.PREFILL, 0, 12000)
        assert shown(message) == ("prefilling 12,000 tokens", 0, None)
        tell(LOWERED, 0.01, fun_name="jit(add)")
        assert shown(message)[0] == "prefilling 12,000 tokens"  # too small to be shown
        tell(LOWERED, 0.5, fun_name="jit(prefill)")
        assert shown(message)[0] == "compiling prefill"
        tell(COMPILED, 6.0, fun_name="jit(prefill)")
        assert shown(message)[0] == "prefilling 12,000 tokens"
        steps.tell(steps.PREFILL, 12000, 12000)
        assert shown(message)[0] == "decoding"
        message.count(3, 4)
        assert shown(message) == ("decoding", 3, 4)
    finally:
        message.close()
    steps.tell(steps.PREFILL, 0, 1)  # nobody listens any more
    message.close()


def test_elsewhere_nothing_is_shown(capsys):
    with waiting("loading it"):
        steps.tell(steps.LOADING, 1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_prompt_tells_of_its_prefill():
    told = []

    def listen(event, value, **values):
        if event in (steps.LOADING, steps.PREFILL):
            told.append((event, value, values["total"]))

    jax.monitoring.register_scalar_listener(listen)
    try:
        target = sj.load("demo-draft")
        layers = target.config.num_layers
        assert told == [(steps.LOADING, i + 1, layers) for i in range(layers)]
        told.clear()
        sj.generate(target, [[5, 6, 7]], max_new_tokens=1)
        assert told == [(steps.PREFILL, 0, 3), (steps.PREFILL, 3, 3)]
    finally:
        jax.monitoring.unregister_scalar_listener(listen)
