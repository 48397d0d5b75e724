"""A real S3 server on loopback for the tests: Ceph's object gateway with one monitor and one OSD in memory."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
PACKAGES = "ceph-mon ceph-osd radosgw ceph-common"
ACCESS_KEY, SECRET_KEY = "headrace", "headrace-secret"
_SECONDS = 90
_CONFIGURATION = """
[global]
fsid = {fsid}
mon_host = v1:127.0.0.1:{monitor_port}
mon_initial_members = a
public_network = 127.0.0.0/8
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
osd_crush_update_on_start = false
osd_class_update_on_start = false
mon_allow_pool_size_one = true
mon_warn_on_pool_no_redundancy = false
mon_pg_warn_min_per_osd = 0
ms_bind_ipv6 = false
run_dir = {root}
admin_socket = {root}/$name.asok
log_file = {root}/$name.log
pid_file = {root}/$name.pid
crash_dir = {root}
keyring = {root}/keyring
mon_data = {root}/mon
osd_data = {root}/osd
osd_objectstore = memstore
memstore_device_bytes = 4294967296
[client.rgw]
rgw_frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw_enable_apis = s3
rgw_thread_pool_size = 32
"""


def missing_programs() -> list[str]:
    """Those of Ceph's programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Gateway:
    """The server and its daemons, children of this process. `root` is a short path: sockets lie below it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = free_port()
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """What clients call the S3 endpoint."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when the gateway answers and its one user exists. Raises `RuntimeError` with the log's end if not."""
        fsid, monitor_port = str(uuid.uuid4()), free_port()
        configuration = _CONFIGURATION.format(fsid=fsid, monitor_port=monitor_port, port=self.port, root=self.root)
        (self.root / "ceph.conf").write_text(configuration)
        for name in ("mon", "osd"):
            (self.root / name).mkdir()
        self._start_monitor(fsid, monitor_port)
        self._start_osd()
        self._daemon("radosgw", "-n", "client.rgw")
        self._wait(self._answers)
        keys = [f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}"]
        self._run("radosgw-admin", "user", "create", "--uid=headrace", "--display-name=headrace", *keys)

    def stop(self) -> None:
        """End the daemons, last started first."""
        for daemon in reversed(self._daemons):
            daemon.kill()  # everything it holds is in memory
            daemon.wait()

    def _start_monitor(self, fsid: str, port: int) -> None:
        keyring, monmap = str(self.root / "keyring"), str(self.root / "monmap")
        caps = ["--cap", "mon", "allow *"]
        subprocess.run(
            ["ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", *caps],
            check=True,
            capture_output=True,
        )
        caps += ["--cap", "osd", "allow *"]
        subprocess.run(
            ["ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *caps], check=True, capture_output=True
        )
        address = f"[v1:127.0.0.1:{port}]"
        subprocess.run(
            ["monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monmap], check=True, capture_output=True
        )
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._daemon("ceph-mon", "-i", "a")

    def _start_osd(self) -> None:
        osd = str(uuid.uuid4())
        self._wait(lambda: self._succeeds("ceph", "osd", "new", osd))  # the monitor refuses until it has its map
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._daemon("ceph-osd", "-i", "0")
        self._wait(lambda: self._succeeds("ceph", "osd", "crush", "add", "osd.0", "1.0", "host=h", "root=default"))

    def _run(self, program: str, *arguments: str) -> None:
        done = self._done(program, *arguments)
        if done.returncode != 0:
            raise RuntimeError(f"{done.args} ended with {done.returncode}:\n{done.stdout}{done.stderr}")

    def _succeeds(self, program: str, *arguments: str) -> bool:
        return self._done(program, *arguments).returncode == 0

    def _done(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [program, "-c", str(self.root / "ceph.conf"), *arguments]
        return subprocess.run(command, timeout=_SECONDS, capture_output=True, text=True, check=False)

    def _daemon(self, program: str, *arguments: str) -> None:
        with (self.root / f"{program}.out").open("wb") as log:
            command = [program, "-f", "-c", str(self.root / "ceph.conf"), *arguments]
            self._daemons.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=self.root))

    def _answers(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def _wait(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _SECONDS
        while not happened():
            dead = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in self.root.glob("*.out"))
                raise RuntimeError(f"the gateway did not start; ended: {dead}\n{logs}")
            time.sleep(0.1)
