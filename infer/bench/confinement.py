"""How a process that runs untrusted code gives up its rights.

infer.bench.sandboxed runs this file as a script, so it imports only the standard library. On Linux
the process keeps no capability, and the system calls in ``DENIED`` fail with EPERM (seccomp, on
x86-64 and ARM64). If asked for, Landlock leaves write access to the current directory, and read
access to Python and the system's libraries.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import sys

NOBODY = 65534
# What untrusted code may read: Python and the system's libraries.
READABLE = ("/usr", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime")
READABLE += (sys.prefix, sys.base_prefix, "/dev/zero", "/dev/urandom")

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
# linux/capability.h
CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_READ_SEARCH = 2

# linux/landlock.h: numbers of the system calls, a kind of rule, and rights.
CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446
CREATE_RULESET_VERSION = 1
PATH_BENEATH = 1
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
TRUNCATE = 1 << 14
IOCTL_DEV = 1 << 15
RIGHTS_OF_FILES = WRITE_FILE | READ_FILE | TRUNCATE  # the others are of directories
BIND_AND_CONNECT_TCP = 3
ABSTRACT_SOCKETS_AND_SIGNALS = 3
# All rights over files, by the version of Landlock's interface, from 1.
RIGHTS = ((1 << 13) - 1, (1 << 14) - 1, (1 << 15) - 1, (1 << 15) - 1, (1 << 16) - 1)

# System calls that reach other processes or the network, create what outlives the process, or
# change files in ways that Landlock does not check: name, number on x86-64, number on ARM64.
DENIED = """
    socket 41 198 connect 42 203 bind 49 200 sendto 44 206 sendmsg 46 211 sendmmsg 307 269
    clone 56 220 fork 57 - vfork 58 - execve 59 221 execveat 322 281 unshare 272 97 setns 308 268
    kill 62 129 tkill 200 130 tgkill 234 131 rt_sigqueueinfo 129 138 rt_tgsigqueueinfo 297 240
    ptrace 101 117 process_vm_readv 310 270 process_vm_writev 311 271 kcmp 312 272
    migrate_pages 256 238 move_pages 279 239 prlimit64 302 261 setpriority 141 140
    sched_setparam 142 118 sched_setscheduler 144 119 sched_setaffinity 203 122
    sched_setattr 314 274 ioprio_set 251 30 setpgid 109 154 setsid 112 157 prctl 157 167
    chmod 90 - fchmod 91 52 fchmodat 268 53 chown 92 - fchown 93 55 lchown 94 - fchownat 260 54
    utime 132 - utimes 235 - futimesat 261 - utimensat 280 88 setxattr 188 5 lsetxattr 189 6
    fsetxattr 190 7 removexattr 197 14 lremovexattr 198 15 fremovexattr 199 16 truncate 76 45
    shmget 29 194 semget 64 190 msgget 68 186 mq_open 240 180 add_key 248 217
    request_key 249 218 keyctl 250 219 open_by_handle_at 304 265 perf_event_open 298 241
    bpf 321 280 userfaultfd 323 282
"""
# Calls from this number on (pidfd_send_signal) fail as unknown: io_uring, clone3 and fchmodat2 are
# among them, and so is every call that a later kernel adds.
FIRST_UNKNOWN = 424
# Calls that are denied if (argument & mask) == value: the call, the argument's index, mask, value.
# They are signals to a descriptor's owner (F_SETOWN, F_SETSIG, F_SETOWN_EX), inode flags ('f' and
# 'X'), owners of sockets, and truncation on opening for reading, which only Landlock from version 3
# on checks.
DENIED_BY_ARGUMENT = (
    *((("fcntl", 72, 25), 1, 0xFFFFFFFF, command) for command in (8, 10, 15)),
    *((("ioctl", 16, 29), 1, 0xFF00, group) for group in (0x6600, 0x5800, 0x8900)),
    (("open", 2, None), 1, os.O_TRUNC | os.O_ACCMODE, os.O_TRUNC),
    (("openat", 257, 56), 2, os.O_TRUNC | os.O_ACCMODE, os.O_TRUNC),
)
# By platform.machine(): the column of the numbers above, and the machine's ID in linux/audit.h.
MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}


# Opcodes of BPF, and the answers of a seccomp filter.
LOAD = 0x20
JUMP_IF_EQUAL = 0x15
JUMP_IF_AT_LEAST = 0x35
AND = 0x54
RETURN = 0x06
ALLOW = 0x7FFF0000
KILL = 0x80000000
FAIL_EPERM = 0x50001
FAIL_ENOSYS = 0x50026
# Offsets in struct seccomp_data. An argument has 8 bytes, and the filter reads the lower 4.
CALL_OFFSET = 0
MACHINE_OFFSET = 4
ARGUMENTS_OFFSET = 16


def confine(limits: dict, landlock: bool) -> None:
    """Gives up, for good, the rights that this module's docstring lists.

    Args:
      limits: ``cpu_s`` in seconds, ``memory`` and ``file_size`` in bytes, and ``files``, the number
        of open files.
      landlock: restrict files with Landlock, too.

    Raises:
      OSError: ``landlock`` is asked for and not available, or the kernel refuses a step.
      RuntimeError: ``landlock`` is asked for on a machine whose system calls cannot be restricted.
    """
    machine = platform.machine()
    if landlock and machine not in MACHINES:
        # Landlock alone would leave chmod and the network, so it does not count as a guard.
        raise RuntimeError(
            f"no filter of system calls for {machine}, expected {' or '.join(MACHINES)}: "
            "use bubblewrap, or --unsafe on a machine of its own"
        )
    libc = ctypes.CDLL(None, use_errno=True)
    is_linux = sys.platform == "linux"
    if os.geteuid() == 0:
        if is_linux:
            libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    if is_linux:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # it dies with its parent
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # its folder in /proc belongs to root
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _drop_capabilities(libc)
    _limit_resources(limits)
    if landlock:
        restrict_files(libc, landlock_version(libc))
    if is_linux and machine in MACHINES:
        restrict_calls(libc, *MACHINES[machine])


def _drop_capabilities(libc) -> None:
    """Drops all capabilities, except for reading if only root may read this Python's library."""

    def keep(effective: int, permitted: int) -> int:
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        # Effective, permitted and inheritable sets, of 32 capabilities each; then the upper 32.
        sets = (ctypes.c_uint32 * 6)(effective, permitted)
        return libc.capset(header, sets)

    read = 1 << CAP_DAC_READ_SEARCH
    failed = keep(0, read)
    try:
        open(os.__file__, "rb").close()
        failed = keep(0, 0)
    except PermissionError:
        failed = failed or keep(read, read)
    if failed:
        raise OSError("the kernel kept capabilities")


def _limit_resources(limits: dict) -> None:
    """Sets the limits on CPU time, memory, files and processes, within those already set."""
    for kind, value in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["file_size"]),
        (resource.RLIMIT_NOFILE, limits["files"]),
        (resource.RLIMIT_NPROC, 1),  # itself: it cannot start a process or thread
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except ValueError:  # macOS has no limit on address space
            if sys.platform == "linux":
                raise


def _checked(result: int) -> int:
    """The result of a C call; raises OSError if it is an error."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def landlock_version(libc) -> int:
    """The version of the kernel's Landlock, from 1; raises OSError if it has none."""
    size = ctypes.c_size_t(0)
    return _checked(libc.syscall(CREATE_RULESET, None, size, CREATE_RULESET_VERSION))


def restrict_files(libc, version: int) -> None:
    """Landlock: writes only in the current directory, no TCP, and no signals to others."""
    rights = RIGHTS[min(version, len(RIGHTS)) - 1]
    network = BIND_AND_CONNECT_TCP if version >= 4 else 0
    scoped = ABSTRACT_SOCKETS_AND_SIGNALS if version >= 6 else 0
    # Older kernels know fewer fields. They accept the rest as long as it is 0.
    fields = struct.pack("QQQ", rights, network, scoped)
    ruleset = _checked(libc.syscall(CREATE_RULESET, fields, ctypes.c_size_t(len(fields)), 0))

    rules = dict.fromkeys(READABLE, READ_FILE | READ_DIR)
    rules[os.devnull] = READ_FILE | WRITE_FILE
    rules[os.getcwd()] = rights & ~IOCTL_DEV
    for path, granted in rules.items():
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        allowed = granted & rights
        if not os.path.isdir(path):
            allowed &= RIGHTS_OF_FILES
        rule = struct.pack("=Qi", allowed, fd)
        _checked(libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0))
        os.close(fd)
    _checked(libc.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def restrict_calls(libc, column: int, machine: int) -> None:
    """Seccomp: the calls above fail; a call by another machine's numbers kills the process."""
    program = call_filter(column, machine)
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    _checked(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, head, 0, 0))


def call_filter(column: int, machine: int) -> bytes:
    """The filter as a program in BPF, over struct seccomp_data.

    An instruction is (opcode, jump if true, jump if false, operand). Jumps count instructions.
    """
    code = [
        (LOAD, 0, 0, MACHINE_OFFSET),
        (JUMP_IF_EQUAL, 1, 0, machine),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, CALL_OFFSET),
        (JUMP_IF_AT_LEAST, 0, 1, FIRST_UNKNOWN),
        (RETURN, 0, 0, FAIL_ENOSYS),
    ]
    for number in DENIED.split()[column::3]:
        if number != "-":
            code += [(JUMP_IF_EQUAL, 0, 1, int(number)), (RETURN, 0, 0, FAIL_EPERM)]
    for call, index, mask, value in DENIED_BY_ARGUMENT:
        if call[column] is None:
            continue
        code += [
            (LOAD, 0, 0, CALL_OFFSET),
            (JUMP_IF_EQUAL, 0, 4, call[column]),
            (LOAD, 0, 0, ARGUMENTS_OFFSET + 8 * index),
            (AND, 0, 0, mask),
            (JUMP_IF_EQUAL, 0, 1, value),
            (RETURN, 0, 0, FAIL_EPERM),
        ]
    code.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
