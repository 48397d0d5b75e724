"""The system calls that a process keeps which decodes: memory, threads, time, its open files, and files to read.

All others fail as if the kernel did not know them (ENOSYS), which libraries have fallbacks for: a socket, another
program, a signal to another process, a file to write. See seccomp(2); the filter is classic BPF.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column below, AUDIT_ARCH
_CALLS: dict[str, tuple[int | None, int | None]] = {  # None: that machine has no such call
    "access": (21, None),
    "brk": (12, 214),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "close": (3, 57),
    "dup": (32, 23),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "fadvise64": (221, 223),
    "fstat": (5, 80),
    "futex": (202, 98),
    "get_mempolicy": (239, 236),
    "getcpu": (309, 168),
    "getcwd": (79, 17),
    "getdents64": (217, 61),
    "getegid": (108, 177),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getrandom": (318, 278),
    "getrusage": (98, 165),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "getuid": (102, 174),
    "lseek": (8, 62),
    "lstat": (6, None),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "newfstatat": (262, 79),
    "poll": (7, None),
    "ppoll": (271, 73),
    "pread64": (17, 67),
    "read": (0, 63),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "readv": (19, 65),
    "recvfrom": (45, 207),
    "recvmsg": (47, 212),
    "restart_syscall": (219, 128),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_yield": (24, 124),
    "sendmsg": (46, 211),
    "sendto": (44, 206),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "sigaltstack": (131, 132),
    "stat": (4, None),
    "statx": (332, 291),
    "sysinfo": (99, 179),
    "time": (201, None),
    "uname": (63, 160),
    "write": (1, 64),
    "writev": (20, 66),
}
_CLONE, _FCNTL, _OPENAT, _TGKILL = (56, 220), (72, 25), (257, 56), (234, 131)
_CLONE_THREAD = 0x10000
# Not F_SETOWN and F_SETSIG, with which the kernel signals other processes.
_FCNTL_COMMANDS = (0, 1, 2, 3, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _EVERY_THREAD = 1, 1
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data; both machines are little-endian
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06  # BPF_LD|W|ABS, BPF_ALU|AND|K, BPF_RET|K
_IF_EQUAL, _IF_AT_LEAST = 0x15, 0x35  # BPF_JMP|JEQ|K, BPF_JMP|JGE|K
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.ENOSYS, 0x80000000
_X32 = 0x40000000  # numbers of x86's third calling convention

_Step = tuple[int, int, int, int]  # code, steps to skip when true, when false, operand


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def restrict_system_calls() -> bool:
    """Keep this process, and its threads, to the calls above, for good. False where that cannot be had.

    Needs PR_SET_NO_NEW_PRIVS first.
    """
    machine = platform.machine()
    if machine not in _MACHINES:
        return False
    column, audited = _MACHINES[machine]
    code = b"".join(struct.pack("<HBBI", *step) for step in _steps(column, audited, os.getpid()))
    program = _Program(len(code) // 8, code)
    call = ctypes.CDLL(None, use_errno=True).syscall
    return bool(call(_SECCOMP[machine], _SET_MODE_FILTER, _EVERY_THREAD, ctypes.byref(program)) == 0)


def _steps(column: int, audited: int, pid: int) -> list[_Step]:
    plain = [numbers[column] for numbers in _CALLS.values()]
    return [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_IF_EQUAL, 1, 0, audited),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        *(step for number in plain if number is not None for step in _allow(number)),
        *_allow_if(_OPENAT[column], argument=2, mask=_WRITING, values=(0,)),
        *_allow_if(_CLONE[column], argument=0, mask=_CLONE_THREAD, values=(_CLONE_THREAD,)),
        *_allow_if(_FCNTL[column], argument=1, mask=0xFFFFFFFF, values=_FCNTL_COMMANDS),
        *_allow_if(_TGKILL[column], argument=0, mask=0xFFFFFFFF, values=(pid,)),  # abort() signals its own thread
        (_RETURN, 0, 0, _REFUSE),
    ]


def _allow(number: int) -> list[_Step]:
    return [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]


def _allow_if(number: int, *, argument: int, mask: int, values: tuple[int, ...]) -> list[_Step]:
    """Allowed when the low half of the argument, of which `mask` is kept, is one of `values`; refused otherwise."""
    rule: list[_Step] = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument), (_AND, 0, 0, mask)]
    rule += [step for value in values for step in _allow(value)]
    rule.append((_RETURN, 0, 0, _REFUSE))
    return [(_IF_EQUAL, 0, len(rule), number), *rule]
