"""A Ray cluster of several nodes on this machine, each with a disk of its own that is lost with it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.ray.conftest import ROOT, kill_all

RAY = str(Path(sys.executable).with_name("ray"))
NODE = ("--num-cpus=1", "--object-store-memory=200000000")
_START_SECONDS = 120
_POLL_SECONDS = 0.2


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


class Node:
    """`ray start --block` as a session of its own; `disk` is its folder for temporary files."""

    def __init__(self, disk: Path, environment: Mapping[str, str], *options: str) -> None:
        disk.mkdir()
        self.disk = disk
        self._log = Path(f"{disk}.log")
        command = [RAY, "start", "--block", "--disable-usage-stats", *options]
        command.append(f"--dashboard-agent-listen-port={free_port()}")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env={**environment, "TMPDIR": str(disk)}, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Until it is one of the cluster's."""
        deadline = time.monotonic() + _START_SECONDS
        while "Ray runtime started" not in self._log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self._log.read_text()
            time.sleep(_POLL_SECONDS)

    def processes(self, title: str = "") -> list[int]:
        """Live processes of the node whose command line holds `title`."""
        return [pid for pid in _session(self.process.pid) if title in command_line(pid)]

    def kill(self) -> None:
        """SIGKILL to its raylet, as when the machine is lost; the disk goes when the last of its processes has."""
        self.wait()
        [raylet] = self.processes("/raylet/raylet ")
        os.kill(raylet, signal.SIGKILL)
        deadline = time.monotonic() + 15
        while self.processes() and time.monotonic() < deadline:
            self.process.poll()
            time.sleep(_POLL_SECONDS)
        self.end()

    def end(self) -> None:
        """End what is left of it, and delete its disk."""
        kill_all(self.processes())
        self.process.wait()
        shutil.rmtree(self.disk, ignore_errors=True)


class RayNodes:
    """The head, with the job server, and `nodes`: one CPU each."""

    def __init__(self, scratch: Path, environment: Mapping[str, str], options: Sequence[str]) -> None:
        self._scratch = scratch
        self._options = options
        self._environment = {
            **environment,
            "RAY_TMPDIR": str(scratch),  # Ray's sockets lie below it
            "RAY_raylet_start_wait_time_s": str(_START_SECONDS),  # on a machine that does other things: not 30
            "PATH": os.pathsep.join([str(Path(RAY).parent), environment["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")]),
        }
        self.port, dashboard = free_port(), free_port()
        self.address = f"http://127.0.0.1:{dashboard}"
        self.nodes: list[Node] = []
        self._started = 0
        self.head = self._start(
            "--head", f"--port={self.port}", f"--dashboard-port={dashboard}", "--include-dashboard=true"
        )

    def wait(self) -> None:
        """Until the job server answers."""
        from ray.job_submission import JobSubmissionClient

        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                JobSubmissionClient(self.address).list_jobs()
                return
            except (ConnectionError, RuntimeError):
                assert time.monotonic() < deadline, "no job server"
                time.sleep(_POLL_SECONDS)

    def add(self) -> Node:
        """A fresh node; it joins within seconds."""
        node = self._start(f"--address=127.0.0.1:{self.port}")
        self.nodes.append(node)
        return node

    def lose(self, node: Node) -> None:
        """Kill a node, with its disk."""
        self.nodes.remove(node)
        node.kill()

    def close(self) -> None:
        """End all of them."""
        for node in [*self.nodes, self.head]:
            node.end()

    def _start(self, *options: str) -> Node:
        self._started += 1
        disk = self._scratch / f"disk-{self._started}"
        return Node(disk, self._environment, *NODE, *self._options, *options)


@contextmanager
def ray_nodes(environment: Mapping[str, str], *options: str, more: int) -> Iterator[RayNodes]:
    """A cluster of a head and `more` nodes, gone with all its files afterwards.

    Its processes have `environment`; each node is started with `options` of `ray start` besides.
    """
    scratch = Path(tempfile.mkdtemp(prefix="hr", dir="/tmp"))
    cluster = RayNodes(scratch, environment, options)
    try:
        cluster.wait()
        for node in [cluster.add() for _ in range(more)]:
            node.wait()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _session(session: int) -> list[int]:
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, _, _, own = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(own) == session and state != "Z":
            found.append(int(entry))
    return found


def processes(title: str) -> list[int]:
    """Processes of this machine whose command line holds `title`."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if title in command_line(pid)]


def command_line(pid: int) -> str:
    """Its words, with a space between two; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
