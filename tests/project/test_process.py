"""Locks of files, and how a program's process ends (specjax._util)."""

import contextlib
import importlib
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from specjax._util.errors import InputError, silence_failures, silence_stderr
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


def work_in(tmp_path, body):
    """Code of a program whose work is ``body``."""
    (tmp_path / "module.py").write_text(f"import os, sys\ndef work(args):\n    {body}\n")
    return f"sys.path.insert(0, {str(tmp_path)!r})\n{RUN_MODULE}\nstart(main)"


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("open('n' * 300)", 1, "x: nnn"),
        ("os.rmdir('.')", 1, "x: .: Invalid argument"),
        ("os.rmdir(os.getcwd()); os.getcwd()", 1, "x: the current directory does not exist any"),
        ("raise OSError('odd')", 1, "x: odd"),
        ("raise MemoryError", 1, "x: out of memory"),
        ("open('\\ud800')", 2, r"x: '\ud800': not in the encoding utf-8"),
    ],
)
def test_what_the_system_refuses_is_one_line(tmp_path, body, code, says):
    (tmp_path / "here").mkdir()
    done = run_process(work_in(tmp_path, body), cwd=tmp_path / "here")
    assert done[0] == code and done[1].startswith(says) and len(done[1].splitlines()) == 1, done


@pytest.mark.parametrize("body", ["print('a'); return 0", "print('a' * 9999)", "os.write(1, b'a')"])
def test_a_full_disk_behind_stdout_is_one_line(tmp_path, body):
    with open("/dev/full", "w") as full:
        code, err = run_process(work_in(tmp_path, body), stdout=full)
    (line,) = err.splitlines()
    assert code == 1 and line.startswith("x: ") and line.endswith("No space left on device")


def test_a_full_disk_behind_the_help_is_one_line():
    with open("/dev/full", "w") as full:
        code, err = run_process("start(lambda: print('usage') or sys.exit(0))", stdout=full)
    assert (code, err) == (1, "help: standard output: No space left on device\n")


CLOSED = """
import os, sys
for number in {closed}:
    os.close(number)
os.execv(sys.executable, [sys.executable, "-c", {code!r}])
"""


@pytest.mark.parametrize("closed", [[2], [0, 2], [0, 1, 2], [1]])
def test_no_file_gets_the_number_of_a_closed_stream(tmp_path, closed):
    """A library's message would be written into it, and Python's to stdout."""
    body = f"f = open({str(tmp_path / 'f')!r}, 'w'); print('lost', file=sys.stderr); "
    body += "os.write(2, b'lost'); f.write(str(f.fileno())); f.close(); raise OSError('odd')"
    code = PREPARED + work_in(tmp_path, body)
    done = subprocess.run(
        [sys.executable, "-c", CLOSED.format(closed=closed, code=code)],
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, b"")
    assert int((tmp_path / "f").read_text()) > 2
    if closed == [1]:
        assert done.stderr == b"lost\nlostx: odd\n"


def test_a_program_that_only_prints_refuses_a_closed_stdout(tmp_path):
    body = "from specjax._util.program import require_output; require_output()"
    code, err = run_process(work_in(tmp_path, f"{body}; sys.stdout = None; {body}"))
    assert code == 2 and "standard output is closed" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("infer.run.commands", ["--list-methods"]),
        ("infer.run.commands", ["--plan"]),
        ("train.lm.__main__", ["tiny", "--dry-run", "--json"]),
        ("train.head.__main__", ["head_demo", "--dry-run"]),
        ("train.sdsat.__main__", ["sdsat_tiny", "--dry-run"]),
        ("train.states", ["head_demo", "--dry-run", "--set=head.states=made"]),
        ("train.lm.__main__", ["--list-configs"]),
    ],
)
def test_what_is_printed_alone_needs_stdout(capsys, monkeypatch, module, arguments):
    main = importlib.import_module(module).main
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", None)
        try:
            code = main(arguments)
        except SystemExit as stop:  # argparse's
            code = stop.code
    err = capsys.readouterr().err
    assert code == 2 and "standard output is closed" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_letters_that_stdout_cannot_write_are_escaped(tmp_path, encoding):
    command = [sys.executable, "-c", PREPARED + work_in(tmp_path, "print('é日\\ud800'); return 0")]
    env = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, env=env, capture_output=True, timeout=60)
    expected = "é日\ud800\n".encode(encoding, errors="backslashreplace")
    assert (done.returncode, done.stderr, done.stdout) == (0, b"", expected)


@pytest.mark.parametrize(
    ("work", "writer"),
    [
        ("infer.quantizing", "write_quantized"),
        ("infer.unpickle", "write_safetensors"),
        ("infer.gguf_directory", "write_directory"),
    ],
)
def test_a_converter_says_that_its_directory_is_gone(tmp_path, monkeypatch, work, writer):
    module = importlib.import_module(work)
    scheme = "int8" if writer == "write_quantized" else None
    args = SimpleNamespace(directory="d", out="o", overwrite=False, pickles=False, quantize=scheme)
    monkeypatch.setattr(module, writer, lambda *_: os.path.realpath("d"))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    try:
        with pytest.raises(InputError, match="the current directory does not exist any more"):
            module.convert(args)
    finally:
        os.chdir(tmp_path)


def test_a_name_that_the_locale_cannot_encode_is_one_line(tmp_path):
    body = "from specjax._util.files import open_file; open_file('\\xe9')"
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    code, err = run_process(work_in(tmp_path, body), env=env)
    reason = "the name is not in the encoding ascii; set LC_ALL=C.UTF-8"
    assert (code, err) == (1, f"x: \\xe9: {reason}\n")


def test_letters_of_arguments_are_read_under_any_locale():
    code = "import sys; from specjax._util.program import any_text; "
    command = [sys.executable, "-c", code + "print(ascii(any_text(sys.argv[1])))", "é日"]
    for env in ({"LC_ALL": "C", "PYTHONUTF8": "0"}, {"LC_ALL": "C"}, {"LC_ALL": "C.UTF-8"}):
        done = subprocess.run(command, env=os.environ | env, capture_output=True, timeout=60)
        assert done.stdout.decode().strip() == ascii("é日"), done


def work_that_fails():
    with contextlib.suppress(ValueError), silence_failures():
        os.write(2, b"lost")
        time.sleep(0.01)
        raise ValueError


def work_in_silence():
    with silence_stderr():
        os.write(2, b"lost")
        time.sleep(0.01)


def test_messages_come_late_if_nothing_fails(capfd):
    for _ in range(2):
        with silence_failures():
            os.write(2, b"late, ")
            os.write(1, b"out, ")
            assert capfd.readouterr() == ("out, ", "")
        assert capfd.readouterr().err == "late, "


@pytest.mark.parametrize("work", [work_that_fails, work_in_silence])
def test_threads_that_silence_stderr_give_it_back(capfd, work):

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
        time.sleep(0.003)
    for thread in threads:
        thread.join()
    os.write(2, b"kept")
    assert capfd.readouterr().err == "kept"


def test_a_plugin_without_its_device_is_one_line():
    """As JAX logs it where CUDA is installed and the machine has no GPU."""
    body = """
import specjax._util.program as program
def work(args):
    import logging
    log = logging.getLogger("jax._src.xla_bridge")
    try:
        raise RuntimeError("Unable to load CUDA.")
    except RuntimeError:
        log.exception("Jax plugin configuration error: Exception when calling initialize()")
    log.error("another error")
    return 0
program.work = work
start(lambda: run("infer.run", "specjax._util.program:work", None))
"""
    code, said = run_process(body)
    assert code == 0
    assert said == "infer.run: JAX uses no GPU or TPU here: Unable to load CUDA.\nanother error\n"


def test_a_closed_output_pipe_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    for main in ("lambda: print('text') or 0", "lambda: print('usage') or sys.exit(0)"):
        assert run_process(f"start({main})", stdout=writer) == (0, "")
    os.close(writer)
