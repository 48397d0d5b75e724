"""One holder at a time; a dead one holds nothing."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import RunLockedError
from pipeline.runs.lock import run_lock
from pipeline.storage import Folder

HOLD = """
import sys, time
from pipeline.runs.lock import run_lock
from pipeline.storage import Folder
with run_lock(Folder(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def test_a_live_holder_is_named_and_a_killed_one_holds_nothing(tmp_path: Path, child: "subprocess.Popen[str]") -> None:
    folder = Folder(str(tmp_path))
    host, year = re.escape(socket.gethostname()), time.gmtime().tm_year
    with pytest.raises(RunLockedError, match=rf"held by .* on host {host}, pid {child.pid}, since {year}-"):
        run_lock(folder).__enter__()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    with run_lock(folder) as lock:
        lock.check()


def test_a_process_does_not_hold_a_run_twice(folder: Folder) -> None:
    with run_lock(folder):
        with pytest.raises(RunLockedError, match=f"pid {os.getpid()},"), run_lock(folder):
            pass
        with pytest.raises(RunLockedError), run_lock(folder):
            pass


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_lock_is_free_after_the_block(folder: Folder, error: type[BaseException] | None) -> None:
    for _ in range(2):
        try:
            with run_lock(folder) as lock:
                lock.check()
                if error:
                    raise error
        except KeyboardInterrupt:
            pass


def test_different_runs_do_not_meet(folder: Folder) -> None:
    with run_lock(folder.sub("a")), run_lock(folder.sub("b")):
        pass


@pytest.fixture
def remote() -> Folder:
    return Folder(f"memory://{uuid.uuid4().hex}")


def put_lock(folder: Folder, age_seconds: float) -> None:
    holder = {"host": "far", "pid": 7, "started": "then", "token": "other", "beat": time.time() - age_seconds}
    folder.write_bytes("_run/lock.json", json.dumps(holder).encode())


def test_a_remote_holder_that_stopped_beating_is_replaced(remote: Folder) -> None:
    put_lock(remote, age_seconds=59)
    with pytest.raises(RunLockedError, match="host far, pid 7, since then"):
        run_lock(remote).__enter__()
    put_lock(remote, age_seconds=61)
    with run_lock(remote):
        assert remote.read_json("_run/lock.json")["pid"] == os.getpid()
    assert not remote.exists("_run/lock.json")


def test_two_that_see_no_remote_lock_do_not_both_get_it(remote: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    put_lock(remote, age_seconds=0)
    answers = iter([b"", remote.read_bytes("_run/lock.json")])
    monkeypatch.setattr(Folder, "read_bytes", lambda self, name: next(answers))
    with pytest.raises(RunLockedError, match="host far, pid 7, since then"):
        run_lock(remote).__enter__()


def wait_until(condition: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_remote_lock_is_kept_fresh(remote: Folder) -> None:
    with run_lock(remote, heartbeat_seconds=0.02):
        first = remote.read_json("_run/lock.json")["beat"]
        wait_until(lambda: remote.read_json("_run/lock.json")["beat"] > first)


def test_losing_a_remote_lock_is_noticed_and_the_new_holder_kept(remote: Folder) -> None:
    with run_lock(remote, heartbeat_seconds=0.02) as lock:
        lock.check()
        put_lock(remote, age_seconds=0)
        wait_until(lock.lost.is_set)
        with pytest.raises(RunLockedError, match="no longer holds the run"):
            lock.check()
    assert remote.read_json("_run/lock.json")["host"] == "far"
