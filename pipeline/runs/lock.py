"""One lock a run: two processes that write one run would corrupt what both promise."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pipeline.errors import HeadraceError, RunLockedError
from pipeline.storage import Folder

_log = logging.getLogger(__name__)
_LOCAL_NAME = "_run/lock"
_REMOTE_NAME = "_run/lock.json"


def run_lock(
    folder: Folder, *, heartbeat_seconds: float = 10.0, stale_seconds: float = 60.0
) -> AbstractContextManager[RunLock]:
    """Hold the run while the block runs. Raises `RunLockedError` naming host, pid and since when.

    Local folders use `flock`, which the kernel frees when the holder dies. Object stores have no such thing: the lock
    is an object created exclusively and rewritten every `heartbeat_seconds`; one not rewritten for `stale_seconds`
    is taken over. On S3 creating, rewriting and taking over are conditional on what was there, so that one of two
    wins; elsewhere two may take over at once. Clocks may differ, so ask `check()` now and then.
    """
    return _local_lock(folder) if folder.is_local else _remote_lock(folder, heartbeat_seconds, stale_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLock:
    """A held lock."""

    where: str
    lost: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raise `RunLockedError` when another process took the lock over, or its heartbeat has ended."""
        if self.lost.is_set():
            raise RunLockedError(f"{self.where}: this process no longer holds the run; start it again to resume")


def current_holder(folder: Folder, *, stale_seconds: float = 60.0) -> dict[str, Any] | None:
    """Who holds the run (host, pid, started), told without touching the lock; None when nobody does.

    Of a local lock whose holder was on another machine nobody can tell whether it lives: it is given as it was noted.
    """
    try:
        noted = _parsed(folder.read_bytes(_LOCAL_NAME if folder.is_local else _REMOTE_NAME))
    except FileNotFoundError:
        return None
    if not noted or time.time() - noted.get("beat", time.time()) >= stale_seconds:
        return None
    if "beat" not in noted and noted["host"] == socket.gethostname() and not os.path.exists(f"/proc/{noted['pid']}"):
        return None
    return {name: noted[name] for name in ("host", "pid", "started")}


@contextmanager
def _local_lock(folder: Folder) -> Iterator[RunLock]:
    path = folder.locate(_LOCAL_NAME)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _locked(folder, _parsed(os.pread(descriptor, 4096, 0))) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_holder()).encode(), 0)
        try:
            yield RunLock(where=folder.url)
        finally:
            # The file stays: unlinking it would let a waiter lock the old inode while another creates a new file.
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


@contextmanager
def _remote_lock(folder: Folder, heartbeat_seconds: float, stale_seconds: float) -> Iterator[RunLock]:
    holder = {**_holder(), "token": uuid.uuid4().hex}
    _take(folder, holder, stale_seconds)
    lock, ending = RunLock(where=folder.url), threading.Event()
    thread = threading.Thread(
        target=_beat, args=(folder, holder, lock, ending, heartbeat_seconds), name="headrace-run-lock", daemon=True
    )
    thread.start()
    try:
        yield lock
    finally:
        ending.set()
        thread.join()
        _release(folder, holder)


def _take(folder: Folder, holder: Mapping[str, Any], stale_seconds: float) -> None:
    version = folder.version(_REMOTE_NAME)  # before the look: what changes in between is then not replaced
    current = _current(folder)
    if current and time.time() - current["beat"] < stale_seconds:
        raise _locked(folder, current)
    if current and version is not None:
        folder.swap_bytes(_REMOTE_NAME, _beaten(holder), version)
    else:
        try:
            folder.create_bytes(_REMOTE_NAME, _beaten(holder))
        except FileExistsError:
            _log.info("%s: another was first, or the answer to a first try was lost", folder.url)
    # Not the answer but the object says who holds it: answers get lost, and some stores ignore conditions.
    current = _current(folder)
    if current.get("token") != holder["token"]:
        raise _locked(folder, current)


def _beat(
    folder: Folder, holder: Mapping[str, Any], lock: RunLock, ending: threading.Event, heartbeat_seconds: float
) -> None:
    try:
        while not ending.wait(heartbeat_seconds):
            try:
                if not _renew(folder, holder):
                    return
            except (OSError, HeadraceError) as error:
                # A store that is away for a moment; staleness decides how long a moment is.
                _log.warning("the lock could not be renewed: %s", error)
    finally:
        if not ending.is_set():
            lock.lost.set()


def _renew(folder: Folder, holder: Mapping[str, Any]) -> bool:
    """Write the lock anew; False when it is another's."""
    version = folder.version(_REMOTE_NAME)
    if version is None or _current(folder).get("token") != holder["token"]:
        return False
    return folder.swap_bytes(_REMOTE_NAME, _beaten(holder), version) or _current(folder).get("token") == holder["token"]


def _release(folder: Folder, holder: Mapping[str, Any]) -> None:
    try:
        if _current(folder).get("token") == holder["token"]:
            folder.remove(_REMOTE_NAME)
    except (OSError, HeadraceError) as error:
        _log.warning("the lock stays until it is stale: %s", error)


def _current(folder: Folder) -> dict[str, Any]:
    try:
        return _parsed(folder.read_bytes(_REMOTE_NAME))
    except FileNotFoundError:
        return {}


def _holder() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _beaten(holder: Mapping[str, Any]) -> bytes:
    return json.dumps({**holder, "beat": time.time()}).encode()


def _parsed(data: bytes) -> dict[str, Any]:
    # Empty between a holder's flock and its first write, and after a clean end.
    return dict(json.loads(data)) if data else {}


def _locked(folder: Folder, holder: Mapping[str, Any]) -> RunLockedError:
    host, pid, started = (holder.get(key, "unknown") for key in ("host", "pid", "started"))
    return RunLockedError(
        f"{folder.url}: held by another run on host {host}, pid {pid}, since {started}; "
        "wait for it, stop it, or use another run_id"
    )
