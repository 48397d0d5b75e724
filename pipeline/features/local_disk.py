"""What a shard asks of the disk it lies on: that it is local, and that a lock dies with its holder."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from types import TracebackType

_MOUNTS = Path("/proc/self/mounts")
_NETWORK = {
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "gfs2",
    "glusterfs",
    "gpfs",
    "lustre",
    "nfs",
    "nfs4",
    "smb3",
    "smbfs",
}
# Rootless containers mount their own root through this one; it is a local disk.
_LOCAL_FUSE = {"fuse.fuse-overlayfs"}


def network_filesystem(path: str) -> str | None:
    """The type of the network (or FUSE) file system that holds `path`, None on a local disk or where unknown."""
    kind = _filesystem(os.path.realpath(path))
    is_network = kind in _NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)
    return kind if is_network else None


def _filesystem(path: str) -> str:
    if not _MOUNTS.exists():
        return ""
    best, kind = "", ""
    for line in _MOUNTS.read_text().splitlines():
        _, raw, candidate, *_ = line.split(" ")
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), raw)  # a space is written \040
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # the last mount over one point is the one that shows
            best, kind = point, candidate
    return kind


class FileLock:
    """A `flock`, exclusive or `shared`, held until `close()` or until the process dies, however it dies.

    Raises `BlockingIOError` when another holds it and `blocking` is False; `FileNotFoundError` when the file is absent
    and `create` is False, or was removed while waiting.
    """

    def __init__(self, path: str, *, blocking: bool, create: bool = True, shared: bool = False) -> None:
        self._pid = os.getpid()
        access = os.O_RDONLY if shared else os.O_RDWR
        self._file = os.open(path, access | (os.O_CREAT if create else 0), 0o644)
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(self._file, kind | (0 if blocking else fcntl.LOCK_NB))
            if not os.path.samestat(os.stat(path), os.fstat(self._file)):
                raise FileNotFoundError(f"{path}: replaced while waiting for its lock")
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go. A forked child that inherited the lock only drops its own descriptor."""
        if self._file < 0:
            return
        if self._pid == os.getpid():
            fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)
        self._file = -1
