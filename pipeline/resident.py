"""Pages that count as a process's own and are not: code that ran once, and what the object store holds anyway.

Linux counts every page of a file that a process has touched as resident in it, until memory runs short. A worker would
seem to keep all the code that it ran when it started, and to grow towards the size of the object store, whose pages it
writes one after another. Nothing happens here where there is no /proc.
"""

from __future__ import annotations

import ctypes
import functools

_MADV_DONTNEED = 4
_STORE_BYTES = 16 * 2**20


@functools.cache
def give_back_code(after: str) -> None:
    """Let go of the code that has run `after` what is named, once a process for each name.

    What runs again comes back from the page cache, 16 pages at a time.
    """
    mapping = ""
    for line in _lines("smaps"):
        if not line[0].isupper():
            mapping = line
        # As the file has it, and nobody writes to it: nothing can be lost.
        elif line.split() == ["Anonymous:", "0", "kB"] and _permissions(mapping) in ("r-xp", "r--p"):
            _forget(mapping)


def give_back_store() -> None:
    """Let go of what this process has touched of Ray's object store, when that is more than 16 MB."""
    if _resident_store_bytes() > _STORE_BYTES:
        for mapping in _lines("maps"):
            # One mapping of /dev/shm, which lasts as long as the process.
            if _permissions(mapping) == "rw-s" and _path(mapping).startswith("/dev/shm/"):
                _forget(mapping)


def _resident_store_bytes() -> int:
    return next((1024 * int(line.split()[1]) for line in _lines("status") if line.startswith("RssShmem:")), 0)


def _permissions(mapping: str) -> str:
    return mapping.split(maxsplit=2)[1]


def _path(mapping: str) -> str:
    return "".join(mapping.split(maxsplit=5)[5:])


def _forget(mapping: str) -> None:
    """Drop this process's view of a mapping of a file, which fills again from the file."""
    start, end = (int(address, 16) for address in mapping.split(maxsplit=1)[0].split("-"))
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.madvise(start, end - start, _MADV_DONTNEED)


def _lines(name: str) -> list[str]:
    try:
        with open(f"/proc/self/{name}", encoding="utf-8") as file:
            return file.readlines()
    except FileNotFoundError:
        return []
