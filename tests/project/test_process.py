"""One writer at a time, and how a program's process ends: specjax._util."""

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
HOLD = """
import sys
from specjax._util.files import locked
with locked(sys.argv[1], "--out"):
    print("held", flush=True)
    input()
"""


def ended(code, **streams):
    """(exit code, stderr) of a process that runs ``code`` through ``start``."""
    command = [sys.executable, "-c", PREPARED + code]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, **streams)
    return done.returncode, done.stderr


def holder(path):
    """A process that holds the lock of ``path``."""
    command = [sys.executable, "-c", HOLD, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_a_lock_says_who_holds_it_and_ends_with_its_process(tmp_path, kind):
    path = asked = tmp_path / "out.jsonl"
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        asked = tmp_path / "link"
        asked.symlink_to(path)
    before = set(tmp_path.rglob("*"))
    process = holder(path)
    says = rf"--out {asked} is being written by process {process.pid} on host \S+ since \d{{4}}-"
    for _ in range(2):
        with pytest.raises(InputError, match=says), locked(asked, "--out"):
            raise AssertionError
    process.kill()
    process.communicate()
    with locked(asked, "--out"):  # what the killed one has left hinders nobody
        (note,) = set(tmp_path.rglob(".*lock"))
        assert f"process {os.getpid()} " in note.read_text()
        with pytest.raises(InputError, match=f"by process {os.getpid()} on"), locked(path, "--out"):
            raise AssertionError
    assert set(tmp_path.rglob("*")) == before


def test_a_lock_is_waited_for_as_long_as_asked(tmp_path):
    path = tmp_path / "out.jsonl"
    process = holder(path)
    with pytest.raises(InputError, match="is being written"), locked(path, "--out", 0.1):
        raise AssertionError
    threading.Timer(0.2, process.communicate, ["\n"]).start()
    with locked(path, "--out", 60):
        assert process.wait() == 0
    assert not list(tmp_path.iterdir())


def test_a_lock_that_was_removed_while_it_was_waited_for_is_made_anew(tmp_path, monkeypatch):
    """Between opening the file and locking it, its holder may have removed it."""
    from specjax._util import files

    path, flock = tmp_path / "out", files.fcntl.flock
    lock = tmp_path / ".out.lock"

    def late(*args):
        monkeypatch.setattr(files.fcntl, "flock", flock)
        lock.unlink()
        return flock(*args)

    monkeypatch.setattr(files.fcntl, "flock", late)
    with locked(path, "--out"):
        assert lock.read_text().startswith(f"process {os.getpid()}")
    assert not lock.exists()


def test_a_lock_that_cannot_be_made_is_one_line(tmp_path):
    says = r"--out .*: cannot be written \(No such file"
    with pytest.raises(InputError, match=says), locked(tmp_path / "no" / "out", "--out"):
        raise AssertionError


ABORTS = "atexit.register(os.abort)  # the interpreter's own end\n"
LOSES = """
def main():
    class Callback:
        def __del__(self): os.kill(os.getpid(), signal.SIGINT); [x for x in range(9)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Callback()  # cannot raise what falls into it
    time.sleep(30)
    return 0
"""
IMPORTS = "main = lambda: run('x', 'module:work', None)"
MODULE = """
import os, signal, sys
def work(args):
    try: signal.raise_signal(signal.SIGINT)
    finally: print("closed", file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("main", ["main = lambda: 130", LOSES])
def test_an_interrupted_process_ends_at_once_with_130(main):
    assert ended(f"{ABORTS}{main}\nstart(main)") == (130, "")


@pytest.mark.parametrize("importing", [True, False])
def test_an_interrupt_leaves_blocks_but_breaks_no_import(tmp_path, importing):
    """An interrupt that is raised while an extension is imported crashes some of them."""
    early = "try: signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt: os.abort()\n"
    (tmp_path / "module.py").write_text(MODULE + early * importing)
    code = f"sys.path.insert(0, {str(tmp_path)!r})\n{ABORTS}{IMPORTS}\nstart(main)"
    assert ended(code) == (130, "" if importing else "closed\n")


def test_other_processes_end_as_ever():
    said = "atexit.register(print, 'the end', file=sys.stderr)\n"
    for main, code in (("lambda: 0", 0), ("lambda: 3", 3), ("lambda: sys.exit(2)", 2)):
        assert ended(f"{said}start({main})") == (code, "the end\n")
    code, err = ended(f"{said}start(lambda: 1 // 0)")
    assert code == 1 and "ZeroDivisionError" in err
    ignoring = f"signal.signal(signal.SIGINT, signal.SIG_IGN)\n{said}"
    assert ended(f"{ignoring}start(lambda: signal.raise_signal(signal.SIGINT) or 0)")[0] == 0


def test_a_reader_that_has_gone_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    for main in ("lambda: print('text') or 0", "lambda: print('usage') or sys.exit(0)"):
        assert ended(f"start({main})", stdout=writer) == (0, "")
    os.close(writer)
