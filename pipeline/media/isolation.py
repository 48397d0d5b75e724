"""What a process gives up before it reads bytes that nobody vouches for. Linux, by prctl(2), unshare(2), seccomp(2)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from pathlib import Path

from pipeline.media.seccomp import restrict_system_calls

NETWORK_NAMESPACE, SECCOMP = "network_namespace", "seccomp"

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CLONE_NEWNET, _CLONE_NEWUSER = 0x40000000, 0x10000000
_CAPABILITY_VERSION_3 = 0x20080522
_FILES = 64
_FIRST_TO_GO = "1000"  # for the kernel, when memory ends

_libc = ctypes.CDLL(None, use_errno=True)


def end_with(parent: int) -> None:
    """Have this process killed when the thread that started it ends; at once when `parent` is no more its parent."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def leave_network() -> tuple[str, ...]:
    """Go where there is no network, not even a loopback device; (`NETWORK_NAMESPACE`,) if that worked.

    To be called while there is one thread: a namespace of users, which others than root need, is for such a process.
    """
    worked = any(_libc.unshare(flags) == 0 for flags in (_CLONE_NEWNET, _CLONE_NEWUSER | _CLONE_NEWNET))
    return (NETWORK_NAMESPACE,) if worked else ()


def give_up_rights() -> tuple[str, ...]:
    """No capabilities, no new privileges, no files written, few opened, no core dumps; (`SECCOMP`,) where it is had.

    To be called when everything is imported.
    """
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, _FILES)):
        resource.setrlimit(limit, (value, value))
    with contextlib.suppress(OSError):  # no /proc
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())
    return (SECCOMP,) if restrict_system_calls() else ()
