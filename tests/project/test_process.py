"""Locks of files, and how a program's process ends (specjax._util)."""

import os
import subprocess
import sys
import threading

import pytest

from specjax._util.errors import InputError
from specjax._util.files import locked

PREPARED = """
import atexit, os, signal, sys, time
from specjax._util.program import run, start
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
"""
HOLD_LOCK = """
import sys
from specjax._util.files import locked
with locked(sys.argv[1], "--out"):
    print("held", flush=True)
    input()
"""


def run_process(code, **streams):
    """(exit code, stderr) of a process that runs ``code`` through ``start``."""
    command = [sys.executable, "-c", PREPARED + code]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, **streams)
    return done.returncode, done.stderr


def start_holder(path):
    """Starts a process that holds the lock of ``path``."""
    command = [sys.executable, "-c", HOLD_LOCK, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_a_lock_names_its_holder_and_ends_with_its_process(tmp_path, kind):
    path = tmp_path / "out.jsonl"
    given = path
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        given = tmp_path / "link"
        given.symlink_to(path)
    before = set(tmp_path.rglob("*"))
    process = start_holder(path)
    message = rf"--out {given} is being written by process {process.pid} on host \S+ since \d{{4}}-"
    for _ in range(2):
        with pytest.raises(InputError, match=message), locked(given, "--out"):
            raise AssertionError
    process.kill()
    process.communicate()
    with locked(given, "--out"):  # the file that the killed process left does not matter
        (note,) = set(tmp_path.rglob(".*lock"))
        assert f"process {os.getpid()} " in note.read_text()
        with pytest.raises(InputError, match=f"by process {os.getpid()} on"), locked(path, "--out"):
            raise AssertionError
    assert set(tmp_path.rglob("*")) == before


def test_a_lock_is_waited_for_until_the_deadline(tmp_path):
    path = tmp_path / "out.jsonl"
    process = start_holder(path)
    with pytest.raises(InputError, match="is being written"), locked(path, "--out", 0.1):
        raise AssertionError
    threading.Timer(0.2, process.communicate, ["\n"]).start()
    with locked(path, "--out", 60):
        assert process.wait() == 0
    assert not list(tmp_path.iterdir())


def test_a_lock_file_that_was_removed_meanwhile_is_made_again(tmp_path, monkeypatch):
    """The holder may remove the file after we open it and before we lock it."""
    from specjax._util import files

    path = tmp_path / "out"
    flock = files.fcntl.flock
    lock = tmp_path / ".out.lock"

    def late(*args):
        monkeypatch.setattr(files.fcntl, "flock", flock)
        lock.unlink()
        return flock(*args)

    monkeypatch.setattr(files.fcntl, "flock", late)
    with locked(path, "--out"):
        assert lock.read_text().startswith(f"process {os.getpid()}")
    assert not lock.exists()


def test_a_lock_file_that_cannot_be_made_is_a_one_line_error(tmp_path):
    message = r"--out .*: cannot be written \(No such file"
    with pytest.raises(InputError, match=message), locked(tmp_path / "no" / "out", "--out"):
        raise AssertionError


ABORT_AT_EXIT = "atexit.register(os.abort)  # the interpreter's own end\n"
LOSES_INTERRUPT = """
def main():
    class Callback:
        def __del__(self): os.kill(os.getpid(), signal.SIGINT); [x for x in range(9)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Callback()  # an exception in it cannot be raised
    time.sleep(30)
    return 0
"""
RUN_MODULE = "main = lambda: run('x', 'module:work', None)"
MODULE = """
import os, signal, sys
def work(args):
    try: signal.raise_signal(signal.SIGINT)
    finally: print("closed", file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("main", ["main = lambda: 130", LOSES_INTERRUPT])
def test_an_interrupted_process_ends_at_once_with_130(main):
    assert run_process(f"{ABORT_AT_EXIT}{main}\nstart(main)") == (130, "")


@pytest.mark.parametrize("importing", [True, False])
def test_an_interrupt_leaves_blocks_but_breaks_no_import(tmp_path, importing):
    """Imports are not interrupted, because that crashes some extension modules."""
    early = "try: signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt: os.abort()\n"
    (tmp_path / "module.py").write_text(MODULE + early * importing)
    code = f"sys.path.insert(0, {str(tmp_path)!r})\n{ABORT_AT_EXIT}{RUN_MODULE}\nstart(main)"
    assert run_process(code) == (130, "" if importing else "closed\n")


def test_processes_that_are_not_interrupted_end_as_usual():
    at_exit = "atexit.register(print, 'the end', file=sys.stderr)\n"
    for main, code in (("lambda: 0", 0), ("lambda: 3", 3), ("lambda: sys.exit(2)", 2)):
        assert run_process(f"{at_exit}start({main})") == (code, "the end\n")
    code, err = run_process(f"{at_exit}start(lambda: 1 // 0)")
    assert code == 1 and "ZeroDivisionError" in err
    ignoring = f"signal.signal(signal.SIGINT, signal.SIG_IGN)\n{at_exit}"
    assert run_process(f"{ignoring}start(lambda: signal.raise_signal(signal.SIGINT) or 0)")[0] == 0


def test_a_closed_output_pipe_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    for main in ("lambda: print('text') or 0", "lambda: print('usage') or sys.exit(0)"):
        assert run_process(f"start({main})", stdout=writer) == (0, "")
    os.close(writer)
