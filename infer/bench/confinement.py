"""What a process that runs unread code gives up; infer.bench.sandboxed reads it as a script.

Imports the standard library alone. On Linux the calls in ``DENIED`` fail with EPERM (seccomp, on
x86-64 and ARM64), no capability is left, and Landlock, where asked for, leaves write access to the
current directory and read access to Python and the system's libraries.
"""

import ctypes
import os
import platform
import resource
import struct
import sys

NOBODY = 65534
READABLE = ("/usr", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime")
READABLE += (sys.prefix, sys.base_prefix, "/dev/zero", "/dev/urandom")

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 1, 4, 8
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
CAPABILITY_VERSION_3, CAP_DAC_READ_SEARCH = 0x20080522, 2

# linux/landlock.h: the calls' numbers, a kind of rule, and rights.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF, PATH_BENEATH = 444, 445, 446, 1
WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
FILES_ALONE = WRITE_FILE | READ_FILE | TRUNCATE
# All rights over files, by the version of the interface, from 1.
RIGHTS = ((1 << 13) - 1, (1 << 14) - 1, (1 << 15) - 1, (1 << 15) - 1, (1 << 16) - 1)

# Calls that reach other processes or the network, outlive the process, or change files in ways
# that Landlock does not see: the name, x86-64's number, ARM64's.
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
# pidfd_send_signal: from here on, io_uring, clone3 and fchmodat2 among them, no call is there.
FIRST_UNKNOWN = 424
# Denied by an argument: the call, the argument's place, a mask, the value under it. Signals of a
# descriptor's owner (F_SETOWN, F_SETSIG, F_SETOWN_EX), inode flags ('f' and 'X') and sockets'
# owners; truncation of what is opened for reading, which Landlock sees from version 3 on.
DENIED_BY_ARGUMENT = (
    *((("fcntl", 72, 25), 1, 0xFFFFFFFF, command) for command in (8, 10, 15)),
    *((("ioctl", 16, 29), 1, 0xFF00, group) for group in (0x6600, 0x5800, 0x8900)),
    (("open", 2, None), 1, os.O_TRUNC | os.O_ACCMODE, os.O_TRUNC),
    (("openat", 257, 56), 2, os.O_TRUNC | os.O_ACCMODE, os.O_TRUNC),
)
# By platform.machine(): the column of the numbers above, and linux/audit.h's name of the machine.
MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}


def confine(limits: dict, landlock: bool) -> None:
    """Renounces all this for good; raises OSError where ``landlock`` cannot be had."""
    libc = ctypes.CDLL(None, use_errno=True)
    linux = sys.platform == "linux"
    if os.geteuid() == 0:
        if linux:
            libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    if linux:
        libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # its folder in /proc is root's
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _drop_capabilities(libc)
    _limit(limits)
    if landlock:
        restrict_files(libc, landlock_version(libc))
    # Landlock alone would leave chmod and the network: a machine of neither kind has no guard.
    if linux and (landlock or platform.machine() in MACHINES):
        restrict_calls(libc, *MACHINES[platform.machine()])


def _drop_capabilities(libc) -> None:
    """Keeps, if it is held, the right to read where only root may read this Python's library."""

    def keep(effective: int, permitted: int) -> int:
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        sets = (ctypes.c_uint32 * 6)(effective, permitted)  # the rest, inheritable too: none
        return libc.capset(header, sets)

    read = 1 << CAP_DAC_READ_SEARCH
    kept = keep(0, read)
    try:
        open(os.__file__, "rb").close()
        kept = keep(0, 0)
    except PermissionError:
        kept = kept or keep(read, read)
    if kept:
        raise OSError("the kernel kept capabilities")


def _limit(limits: dict) -> None:
    for kind, value in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["file_size"]),
        (resource.RLIMIT_NOFILE, limits["files"]),
        (resource.RLIMIT_NPROC, 1),  # itself: no process and no thread more
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _must(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def landlock_version(libc) -> int:
    """Of the kernel's interface, from 1; raises OSError where there is none."""
    return _must(libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def restrict_files(libc, version: int) -> None:
    """Landlock: write access to the current directory alone, TCP and signals to no one."""
    rights = RIGHTS[min(version, len(RIGHTS)) - 1]
    net, scoped = 3 if version >= 4 else 0, 3 if version >= 6 else 0
    fields = struct.pack("QQQ", rights, net, scoped)
    # What an older kernel does not know must be 0, so it may be given.
    ruleset = _must(libc.syscall(CREATE_RULESET, fields, ctypes.c_size_t(len(fields)), 0))
    rules = dict.fromkeys(READABLE, READ_FILE | READ_DIR)
    rules |= {os.devnull: READ_FILE | WRITE_FILE, os.getcwd(): rights & ~IOCTL_DEV}
    for path, granted in rules.items():
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        allowed = granted & rights & (-1 if os.path.isdir(path) else FILES_ALONE)
        rule = struct.pack("=Qi", allowed, place)
        _must(libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0))
        os.close(place)
    _must(libc.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def restrict_calls(libc, column: int, machine: int) -> None:
    """Seccomp: the calls above fail; a call in another machine's way, 32 bits, is the end."""
    program = call_filter(column, machine)
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    _must(libc.prctl(PR_SET_SECCOMP, 2, head, 0, 0))


def call_filter(column: int, machine: int) -> bytes:
    """The filter in BPF, over struct seccomp_data: the call, the machine, …, the arguments."""
    load, equal, at_least, mask, answer = 0x20, 0x15, 0x35, 0x54, 0x06
    allow, kill, eperm, enosys = 0x7FFF0000, 0x80000000, 0x50001, 0x50026
    code = [(load, 0, 0, 4), (equal, 1, 0, machine), (answer, 0, 0, kill), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, FIRST_UNKNOWN), (answer, 0, 0, enosys)]
    for number in DENIED.split()[column::3]:
        if number != "-":
            code += [(equal, 0, 1, int(number)), (answer, 0, 0, eperm)]
    for call, place, bits, value in DENIED_BY_ARGUMENT:
        if call[column] is not None:
            code += [(load, 0, 0, 0), (equal, 0, 4, call[column]), (load, 0, 0, 16 + 8 * place)]
            code += [(mask, 0, 0, bits), (equal, 0, 1, value), (answer, 0, 0, eperm)]
    code.append((answer, 0, 0, allow))
    return b"".join(struct.pack("HBBI", *line) for line in code)
