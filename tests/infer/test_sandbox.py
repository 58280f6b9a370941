"""pass@1: what a test can check in another process, and what that process cannot do."""

import ctypes
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from infer.bench import commands as bench
from infer.bench import confinement, sandbox
from infer.bench.folder import Folder
from infer.bench.sandbox import (
    BUBBLEWRAP,
    LANDLOCK,
    Limits,
    SandboxResult,
    humaneval_program,
    run_task,
)
from infer.bench.sandboxed import decode, encode
from specjax._util.errors import OptionError


def kernel_has_landlock():
    """Asks the kernel itself, because our own answer is under test."""
    version = (444, None, ctypes.c_size_t(0), 1)  # landlock_create_ruleset(NULL, 0, VERSION)
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(*version) > 0


needs_landlock = pytest.mark.skipif(not kernel_has_landlock(), reason="a kernel without Landlock")
# Verdicts need no guard, so their tests also run where no guard works.
HERE = LANDLOCK if kernel_has_landlock() else None
# A folder that any user may enter; only root may enter pytest's. It is in memory, because deep
# folders are slow on a disk.
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp"
SHORT = Limits(wall_s=8, cpu_s=1)
TASK = {
    "prompt": "def double(x):\n",
    "entry_point": "double",
    "test": "def check(f):\n    assert f(4) == 8\n    assert f(0) == 0\n",
}
RIGHT, WRONG = "\ndef double(x):\n    return x + x\n", "\ndef double(x):\n    return 3\n"


@pytest.fixture(autouse=True)
def traces(monkeypatch, tmp_path_factory):
    """An empty temporary folder that anyone may enter; a test may leave nothing in it."""
    tmp_path_factory.getbasetemp()  # so that pytest makes its folder in the usual place first
    with tempfile.TemporaryDirectory(dir=SCRATCH) as place:
        os.chmod(place, 0o755)
        monkeypatch.setattr(tempfile, "tempdir", place)
        yield place
        assert os.listdir(place) == []


has_bubblewrap = shutil.which("bwrap") is not None
needs_bubblewrap = pytest.mark.skipif(not has_bubblewrap, reason="bubblewrap is not installed")


@pytest.fixture(
    params=[
        pytest.param(LANDLOCK, marks=needs_landlock),
        pytest.param(BUBBLEWRAP, marks=needs_bubblewrap),
    ]
)
def guard(request):
    """Each guard that works here."""
    return request.param


@pytest.fixture
def outside(traces):
    """A folder with a file that any user may change, so that only a guard can refuse it."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as place:
        Path(place, "mine").write_text("mine")
        os.chmod(f"{place}/mine", 0o666)
        os.chmod(place, 0o777)
        yield place
        assert os.listdir(place) == ["mine"], "created or deleted something"
        assert Path(place, "mine").read_text() == "mine"
        assert Path(place, "mine").stat().st_mode & 0o777 == 0o666


# --- what a test can check -------------------------------------------------------------------

JUDGED = {
    "values of every plain kind": (
        "def f(x):\n    return x",
        """
for x in (None, True, 3, 10**5000, 1.5, math.inf, "a\\ud800", b"a", 2j, [1, [2]], (1, (2,)), {1},
          set(), {(1, 2): {"a": []}}, frozenset({1}), bytearray(b"x"), range(1, 9, 2)):
    assert f(x) == x and type(f(x)) is type(x)
assert math.isnan(f(math.nan))
""",
    ),
    "keywords": ("def f(x, *, y=2):\n    return x - y", "assert f(x=5, y=1) == 4 and f(5) == 3"),
    "arguments changed in place": (
        "def f(x, y):\n    x.sort(); y['n'] = 1; x[0].append(9)",
        "x, y = [[2], [1]], {}\nassert f(x, y) is None and x == [[1, 9], [2]] and y == {'n': 1}",
    ),
    "generators": ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2] != f(3)"),
    "exceptions": (
        "class Odd(KeyError): pass\ndef f(x):\n    raise Odd(x) if x else ValueError('no')",
        """
for x, kind in ((0, ValueError), (1, KeyError)):
    try:
        f(x)
    except kind:
        continue
    assert False
""",
    ),
    "state between calls": (
        "n = 0\ndef f():\n    global n\n    n += 1\n    return n",
        "assert [f(), f()] == [1, 2]",
    ),
    "its folder and printing": (
        """
import os, tempfile
print("out of sight")
def f(name):
    assert os.listdir() == []
    with tempfile.NamedTemporaryFile() as file:
        assert os.path.dirname(file.name) == os.getcwd()
    os.mkdir("a"); open("a/" + name, "w").write("x"); os.rename("a/" + name, name)
    return open(name).read()
""",
        "assert f('note') == 'x'",
    ),
}


@pytest.mark.parametrize("name", JUDGED)
def test_right_functions_pass(name):
    program, test = JUDGED[name]
    indented = "\n    ".join(["import math", *test.splitlines()])
    task = {"prompt": "", "entry_point": "f", "test": f"def check(f):\n    {indented}\n"}
    assert run_task(task, program, HERE) == SandboxResult(passed=True)


def test_a_test_may_call_helpers_of_the_prompt():
    prompt = "import math\n\ndef double(x):\n    return 2 * x\n\n\ndef halve(x):\n    'Halves'\n"
    test = "def check(f):\n    assert f(double(math.pi)) == math.pi == halve(double(math.pi))\n"
    task = {"prompt": prompt, "entry_point": "halve", "test": test}
    right = humaneval_program(task, "    return x / 2")
    assert run_task(task, right, HERE).passed
    # If the model redefines a helper, the test still has the prompt's.
    assert run_task(task, f"{right}\ndouble = print", HERE).passed
    broken = task | {"prompt": "no python\ndef halve(x):\n"}
    assert "prompt's own text" in run_task(broken, right, HERE).unjudged


@pytest.mark.parametrize("value", [object(), print, [1, {2: object()}]])
def test_values_that_are_not_plain_data_are_not_judged(value):
    with pytest.raises(TypeError, match="not plain data"):
        encode(value)


def test_plain_data_is_the_same_after_encoding_and_decoding():
    class Sub(dict): ...

    values = [np.float64(0.1), np.int64(3), np.bool_(True), Sub(a=1)]
    back = decode(json.loads(json.dumps(encode(values))))
    assert back == [0.1, 3, True, {"a": 1}]
    assert [type(value) for value in back] == [float, int, bool, dict]
    assert math.isnan(decode(json.loads(json.dumps(encode(math.nan)))))


def test_pass_at_1_counts_passing_completions(capsys):
    right = "    return x + x\n\ndef other():\n    broken ("  # what follows the function is cut
    assert "other" not in humaneval_program(TASK, right)
    completions = [right, "    return x * x", "    return", right, "    return object()"]
    programs = [humaneval_program(TASK, text) for text in completions]
    assert sum(sandbox.passing([TASK] * 5, programs, HERE)) == 2
    assert "counts 1 of 5 as failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "says"), [({"prompt": "x"}, "'test'"), (TASK | {"entry_point": "a; b"}, "a; b")]
)
def test_prompts_that_are_no_tasks_are_refused(task, says):
    with pytest.raises(OptionError, match=says):
        sandbox.check_tasks([TASK, task])


# --- what the function's process cannot do ---------------------------------------------------

# Each must fail with OSError; {out} is one of our folders, {us} is our process.
REFUSED = {
    "overwrite": "open('{out}/mine', 'w')",
    "append": "open('{out}/mine', 'a')",
    "append to the sandbox": "open({sandbox!r}, 'a')",
    "append to Python": "open(os.__file__, 'a')",
    "delete": "os.remove('{out}/mine')",
    "rename": "os.rename('{out}/mine', '{out}/yours')",
    "take": "os.rename('{out}/mine', 'mine')",
    "truncate": "os.truncate('{out}/mine', 0)",
    "truncate, opened for reading": "os.open('{out}/mine', os.O_TRUNC)",
    "truncate Python, opened for reading": "os.open(os.__file__, os.O_TRUNC)",
    "make": "open('{out}/new', 'w')",
    "make a folder": "os.mkdir('{out}/new')",
    "make a link": "os.symlink('/', '{out}/new')",
    "hard link": "os.link('{out}/mine', 'mine')",
    "write over a link": "os.symlink('{out}/mine', 'link'); open('link', 'w')",
    "leave by ..": "open('../new', 'w')",
    "mode": "os.chmod('{out}/mine', 0)",
    "date": "os.utime('{out}/mine', (0, 0))",
    "owner": "os.chown('{out}/mine', 65534, 65534)",
    "attribute": "os.setxattr('{out}/mine', 'user.x', b'1')",
    "read": "open('{out}/mine')",
    "list": "os.listdir('{out}')",
    "read what it was told": "open('/proc/self/cmdline')",
    "read our memory": "open('/proc/{us}/mem', 'rb')",
    "temporary folder": "open('/tmp/specjax-attack', 'w')",
    "shared memory": "open('/dev/shm/specjax-attack', 'w')",
    "System V shared memory": "must(libc.shmget(0, 4096, 0o1600))",
    "System V messages": "must(libc.msgget(0, 0o1600))",
    "message queue": "must(libc.mq_open(b'/specjax-attack', os.O_CREAT | os.O_RDWR, 0o600, None))",
    "large file": "open('f', 'wb').write(bytes(2 << 20))",
    "many files": "held = [open('f', 'w') for _ in range(99)]",
    "fork": "os.fork()",
    "posix_spawn": "os.posix_spawn('/bin/true', ['true'], {{}})",
    "exec": "os.execv('/bin/true', ['true'])",
    "shell": "subprocess.run('true')",
    "thread": "thread()",
    "session": "os.setsid()",
    "signal to us": "os.kill({us}, 0)",
    "signal to all": "os.kill(-1, 0)",
    "signal by a pipe's owner": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, {us})",
    "our priority": "os.setpriority(os.PRIO_PROCESS, {us}, 19)",
    "our cores": "os.sched_setaffinity({us}, [0])",
    "our limits": "must(libc.prlimit({us}, 0, bytes(16), None))",
    "trace us": "must(libc.ptrace(16, {us}, None, None))",
    "new namespaces": "must(libc.unshare(0x10000000))",
    "become root": "os.setuid(0)",
    "io_uring": "must(libc.syscall(425, 1, ctypes.create_string_buffer(120)))",
    "pidfd": "must(libc.syscall(434, {us}, 0))",
    "socket": "socket.socket()",
    "datagrams": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "local socket": "socket.socket(socket.AF_UNIX)",
    "connect a pair": "socket.socketpair(type=socket.SOCK_DGRAM)[0].connect('/dev/log')",
}
HARNESS = """
import ctypes, fcntl, os, socket, subprocess, threading

libc = ctypes.CDLL(None, use_errno=True)

def must(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")

def thread():
    try:
        threading.Thread(target=print).start()
    except RuntimeError as error:
        raise OSError from error

def attempt(code):
    try:
        exec(code)
    except OSError:
        return ""
    except BaseException as error:
        return repr(error)
    return "done"
"""


def allowed(guard: str | None, attacks: dict[str, str]) -> bool:
    """Whether any of the attacks ends in anything but an OSError."""
    test = (
        f"def check(f):\n    for code in {list(attacks.values())!r}:\n        assert f(code) == ''"
    )
    task = {"prompt": "", "entry_point": "attempt", "test": test}
    return not run_task(task, HARNESS, guard).passed


def test_attacks_are_refused(guard, outside):
    names = {"out": outside, "us": os.getpid(), "sandbox": str(sandbox.CHILD)}
    attacks = {name: code.format(**names) for name, code in REFUSED.items()}
    source = sandbox.CHILD.read_bytes()
    if allowed(guard, attacks):  # one run for all; if one is allowed, find out which
        assert [name for name, code in attacks.items() if allowed(guard, {name: code})] == []
    assert sandbox.CHILD.read_bytes() == source
    # The attacks are real: without a guard, this one succeeds.
    assert allowed(None, {"read": attacks["read"]})


def test_no_capability_is_effective_except_for_reading_a_python_of_roots():
    # capget reads the thread's own capabilities. None of them may allow writing files.
    program = """
import ctypes
def held():
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capget(header, sets) == 0
    return [word & ~(1 << 2) for word in sets]
"""
    test = "def check(f):\n    assert f() == [0] * 6\n"
    task = {"prompt": "", "entry_point": "held", "test": test}
    assert run_task(task, program, HERE).passed


# None of these returns what the test expects; some never end.
FORGERIES = {
    "wrong": WRONG,
    "does not parse": "def double(:",
    "raises": "1 / 0",
    "ends early": "import sys; sys.exit(0)" + RIGHT,
    "ends early, hard": "import os; os._exit(0)" + RIGHT,
    "ends in the call": "import os\ndef double(x): os._exit(0)",
    "exits in the call": "import sys\ndef double(x): sys.exit(0)",
    "defines nothing": "pass",
    "says passed": "import os\nfor at in range(32):\n    try:\n"
    "        os.write(at, b'{\"passed\": true}\\n')\n    except OSError: pass" + WRONG,
    "equals everything": "class Any(int):\n    def __eq__(self, other): return True\n"
    "def double(x): return Any(3)",
    "equals everything, no data": "class Any:\n    def __eq__(self, other): return True\n"
    "def double(x): return Any()",
    "patches builtins": "import builtins, json\nbuiltins.AssertionError = type('A', (), {})\n"
    "builtins.exec = builtins.compile = lambda *a: None\njson.loads = lambda *a: [[8], {}]" + WRONG,
    "finds the test in memory": "import gc, sys\nframe = sys._getframe()\nseen = list(sys.argv)\n"
    "while frame:\n    seen += map(repr, frame.f_locals.values()); frame = frame.f_back\n"
    "plain = dict, list, tuple\n"
    "seen += [repr(x) for x in gc.get_objects() if type(x) in plain and len(x) < 99]\n"
    "found = any('f(4)_'.replace('_', ' ') in text for text in seen)\n"
    "def double(x): return x + x if found else 3",
    "finds the test on disk": "import os\nfound = bool(os.listdir())\n"
    "def double(x): return x + x if found else 3",
    "reads our environment": "import os; assert 'PATH' in os.environ" + RIGHT,
    "reaches our modules": "import infer.bench.sandbox" + RIGHT,
    "takes memory": "x = bytearray(2 << 30)" + RIGHT,
    "never ends": "while True: pass",
    "answers too deep": "import os\ndef double(x): os.write(1, b'[' * 1000000)\n"
    "for at in range(32):\n    try: os.write(at, b'[' * 60000 + b'\\n')\n    except OSError: pass",
    "answers too deep, as data": "def double(x):\n    y = []\n    for _ in range(99999): y = [y]\n"
    "    return y",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_verdicts_fail(name):
    assert not run_task(TASK, FORGERIES[name], HERE, SHORT).passed


def test_a_test_that_swallows_exceptions_still_fails_if_the_worker_is_lost():
    test = "def check(f):\n    try:\n        f(1)\n    except BaseException:\n        pass\n"
    task = TASK | {"test": test}
    assert not run_task(task, FORGERIES["ends in the call"], HERE).passed
    assert not run_task(task, FORGERIES["equals everything, no data"], HERE).passed
    assert run_task(task, "def double(x): raise ValueError", HERE).passed


def test_a_verdict_of_600_mb_is_not_read():
    flood = "import os\ndef double(x):\n    for at in range(32):\n        try:\n"
    flood += "            for _ in range(600): os.write(at, bytes(1 << 20))\n"
    flood += "        except OSError: pass\n"
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_kib()
    assert not run_task(TASK, flood, HERE, SHORT).passed
    grown = peak_kib() - before
    assert grown < 20 << 10, f"{grown} KiB"


def peak_kib():
    """The most memory that this process has held."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def test_answers_are_bounded():
    test = "def check(f):\n    assert f(1 << 20) and f(5 << 20)\n"
    task = TASK | {"test": test}
    assert not run_task(task, "def double(x): return 'x' * x", HERE).passed
    assert run_task(task, "def double(x): return 'x' * min(x, 1 << 20)", HERE).passed


FILLING = {
    "bytes": "for n in range(20): open(f'{n}', 'wb').write(bytes(1 << 20))",
    "files": "for n in range(200): open(f'{n}', 'w')",
    "depth": "for n in range(200): os.mkdir('d' * 250); os.chdir('d' * 250)",
    "links": "for n in range(200): os.symlink('x', f'{n}')",
}


@pytest.mark.parametrize("name", FILLING)
def test_a_program_ends_if_its_folder_grows(name, guard):
    program = f"import os\n{FILLING[name]}\n{RIGHT}"
    assert not run_task(TASK, program, guard).passed
    little = program.replace("20", "9")
    assert run_task(TASK, little, guard).passed


def test_sleeping_processes_are_killed(monkeypatch):
    started = []
    start = sandbox._start
    monkeypatch.setattr(sandbox, "_start", lambda *a: started.append(start(*a)) or started[-1])
    program = "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
    for sleep in ("time.sleep(60)", "def double(x): time.sleep(60)"):
        assert not run_task(TASK, program + sleep, HERE, Limits(wall_s=0.5)).passed
    assert len(started) == 4 and all(process.returncode is not None for process in started)


# --- the folder ------------------------------------------------------------------------------


def deep(depth: int) -> None:
    """Makes nested folders, longer than any path may be, the last one unreadable."""
    place = os.open(".", os.O_RDONLY)
    for level in range(depth):
        os.mkdir("d" * 100, 0o000 if level == depth - 1 else 0o700, dir_fd=place)
        if level < depth - 1:
            inner = os.open("d" * 100, os.O_RDONLY, dir_fd=place)
            os.close(place)
            place = inner
    os.close(place)


def test_folder_is_removed_however_deep_or_locked(monkeypatch, outside):
    assert sys.getrecursionlimit() < 1200
    with Folder() as home:
        monkeypatch.chdir(home.path)
        deep(1200)
        os.symlink(outside, "out")
        os.link(f"{outside}/mine", "hard")
        os.makedirs("locked/inner")
        Path("locked/inner/f").touch()
        os.chmod("locked/inner", 0)
        os.chmod("locked", 0)
        os.chmod(home.path, 0)
        monkeypatch.chdir("/")
    assert not os.path.exists(home.path)


def test_folder_is_removed_though_files_appear_late(monkeypatch):
    rmdir = os.rmdir
    late = []

    def write_first(path, **kwargs):
        if path == home.path and not late:
            late.append(Path(path, "late").write_text("x"))
        rmdir(path, **kwargs)

    monkeypatch.setattr(os, "rmdir", write_first)
    with Folder() as home:
        Path(home.path, "early").touch()
    assert late and not os.path.exists(home.path)


def test_size_of_a_folder(monkeypatch):
    with Folder() as home:
        monkeypatch.chdir(home.path)
        os.makedirs("a/b")
        Path("a/b/f").write_bytes(bytes(1000))
        os.symlink("/", "a/out")
        os.symlink("..", "a/up")
        assert home.is_within(5, 1 << 20) and not home.is_within(4, 1 << 20)
        assert not home.is_within(5, 999)
        monkeypatch.chdir("/")


# --- guards ----------------------------------------------------------------------------------


@needs_landlock
def test_a_guard_is_found_here():
    sandbox.find_guard.cache_clear()
    assert sandbox.choose_guard(unsafe=False) == LANDLOCK


def test_without_a_guard_nothing_runs_unless_asked(monkeypatch, capsys):
    monkeypatch.setattr(sandbox, "find_guard", lambda: None)
    with pytest.raises(OptionError, match=r"Landlock.*bubblewrap.*--unsafe"):
        sandbox.choose_guard(unsafe=False)
    assert sandbox.choose_guard(unsafe=True) is None
    assert "can read and change your files" in capsys.readouterr().err
    assert run_task(TASK, RIGHT, None).passed and not run_task(TASK, WRONG, None).passed
    assert bench.main(["--prompts", "tasks.jsonl", "--run-tests"]) == 2  # before anything is read
    (line,) = capsys.readouterr().err.splitlines()
    assert "--unsafe" in line and "bubblewrap" in line


def test_a_machine_whose_calls_cannot_be_restricted_is_named(monkeypatch):
    monkeypatch.setattr(confinement.platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(confinement, "_limit_resources", lambda limits: pytest.fail("too late"))
    message = "system calls for riscv64, expected x86_64 or aarch64: use bubblewrap, or --unsafe"
    with pytest.raises(RuntimeError, match=message):
        confinement.confine({}, landlock=True)


@pytest.mark.parametrize("confines", [False, True])
def test_bubblewrap_is_the_second_choice_if_it_confines(confines, tmp_path, monkeypatch):
    arguments = tmp_path / "arguments"
    fake = tmp_path / "bwrap"
    script = 'while [ "$1" != --chdir ]; do shift; done\nshift 2\nexec "$@"'
    fake.write_text(f'#!/bin/sh\necho "$@" > {arguments}\n{script}')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run = run_task

    def without_landlock(task, program, guard):
        outcome = run(task, program, guard)
        return SandboxResult(guard == BUBBLEWRAP and (confines or outcome.passed))

    monkeypatch.setattr(sandbox, "run_task", without_landlock)
    sandbox.find_guard.cache_clear()
    assert sandbox.find_guard() == (BUBBLEWRAP if confines else None)
    assert "--unshare-all" in arguments.read_text()
    sandbox.find_guard.cache_clear()


def test_bubblewrap_binds_one_folder_to_write_in(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/bwrap")
    command = sandbox.bubblewrapped(["python", "x"], "/home/h")
    assert command[0] == "/usr/bin/bwrap" and command[-4:] == ["--chdir", "/home/h", "python", "x"]
    bound = [command[i + 1 : i + 3] for i, word in enumerate(command) if word == "--bind"]
    assert bound == [["/home/h", "/home/h"]]
    devices = [command[i + 1] for i, word in enumerate(command) if word == "--dev-bind"]
    assert set(devices) == {"/dev/null", "/dev/zero", "/dev/urandom"}
    assert {"--unshare-all", "--die-with-parent", "--cap-drop"} < set(command)
    assert command.index("--remount-ro") > command.index("--bind")


@needs_landlock
def test_landlock_of_every_version(outside):
    """Older kernels know fewer rights; seccomp denies what they leave open."""
    code = f"""
import ctypes, os, platform, runpy, sys
c = runpy.run_path({confinement.__file__!r})
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
c["restrict_files"](libc, int(sys.argv[1]))
c["restrict_calls"](libc, *c["MACHINES"][platform.machine()])
os.mkdir("a"); open("a/f", "w").write("x"); open("a/f", "w"); os.remove("a/f"); os.rmdir("a")
out = {outside!r}
for attack in (
    lambda: open(out + "/mine", "w"),
    lambda: open(out + "/new", "w"),
    lambda: os.remove(out + "/mine"),
    lambda: os.truncate(out + "/mine", 0),
    lambda: os.open(out + "/mine", os.O_TRUNC),
    lambda: os.open(os.__file__, os.O_TRUNC),
    lambda: os.link(out + "/mine", "mine"),
    lambda: os.chmod(out + "/mine", 0),
):
    try:
        attack()
    except OSError:
        continue
    raise AssertionError
"""
    for version in range(1, confinement.landlock_version(ctypes.CDLL(None)) + 1):
        with Folder() as home:
            command = [sys.executable, "-I", "-B", "-c", code, str(version)]
            subprocess.run(command, cwd=home.path, check=True)


# --- the filter of calls ---------------------------------------------------------------------

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50001, 0x50026


def filtered(program: bytes, machine: int, call: int, *args: int) -> int:
    """The kernel's answer to a call, by an interpreter of the BPF instructions that we use."""
    data = struct.pack("<iIQ6Q", call, machine, 0, *args, *[0] * (6 - len(args)))
    at = 0
    accumulator = 0
    while True:
        code, yes, no, k = struct.unpack_from("HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif code == 0x54:
            accumulator &= k
        elif code == 0x06:
            return k
        else:
            jumps = accumulator == k if code == 0x15 else accumulator >= k
            at += yes if jumps else no


@pytest.mark.parametrize(
    ("machine", "read", "openat", "socket", "fcntl"),
    [("x86_64", 0, 257, 41, 72), ("aarch64", 63, 56, 198, 25)],
)
def test_filter_of_calls(machine, read, openat, socket, fcntl):
    column, audit = confinement.MACHINES[machine]
    program = confinement.call_filter(column, audit)
    for want, *call in (
        (ALLOW, read),
        (ALLOW, openat, 0, 0, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (ALLOW, openat, 0, 0, os.O_RDONLY),
        (EPERM, openat, 0, 0, os.O_RDONLY | os.O_TRUNC),
        (EPERM, socket),
        (ALLOW, fcntl, 0, 1),
        (EPERM, fcntl, 0, 8),
        (EPERM, fcntl, 0, 8 | 1 << 40),  # the kernel reads 32 bits
        (ENOSYS, 424),
        (ENOSYS, 452),
        (ENOSYS, 0x40000000 | read),  # the x32 numbers of the calls on x86-64
    ):
        assert filtered(program, audit, *call) == want, call
    assert filtered(program, audit ^ 1, read) == KILL
