"""Repeated ids of a listing of any size, found in bounded memory."""

from __future__ import annotations

import hashlib
import struct
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

_SPILL_BUCKETS = 64
_SPILL_RECORD = struct.Struct("<16sqq")
_SPILL_DTYPE = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<i8"), ("item_index", "<i8")])


@dataclass(frozen=True, kw_only=True, slots=True)
class Duplicate:
    """Two rows of a manifest with one id; `item_index` is of the second."""

    row: int
    repeated_row: int
    item_index: int


class IdSpill:
    """Finds repeated ids in bounded memory: 16-byte digests on disk in 64 buckets, compared bucket by bucket."""

    def __init__(self) -> None:
        self.count = 0
        self._stack = ExitStack()
        self._files: list[IO[bytes]] = []

    def __enter__(self) -> IdSpill:
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-ids-")))
        for bucket in range(_SPILL_BUCKETS):
            self._files.append(self._stack.enter_context(open(directory / str(bucket), "w+b", buffering=2**16)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, id_: str, row: int) -> None:
        """Put down the id of the next item."""
        digest = hashlib.blake2b(id_.encode(), digest_size=16).digest()
        self._files[digest[0] % _SPILL_BUCKETS].write(_SPILL_RECORD.pack(digest, row, self.count))
        self.count += 1

    def first_duplicate(self) -> Duplicate | None:
        """The repetition that a reader of the manifest meets first."""
        found = [duplicate for duplicate in map(_duplicate_in, self._files) if duplicate is not None]
        return min(found, key=lambda duplicate: duplicate.repeated_row, default=None)


def _duplicate_in(file: IO[bytes]) -> Duplicate | None:
    file.seek(0)
    records = np.frombuffer(file.read(), dtype=_SPILL_DTYPE)
    records = records[np.lexsort((records["row"], records["low"], records["high"]))]
    same = (records["high"][1:] == records["high"][:-1]) & (records["low"][1:] == records["low"][:-1])
    repeats = np.flatnonzero(same)
    if not repeats.size:
        return None
    first = repeats[np.argmin(records["row"][repeats + 1])]
    return Duplicate(
        row=int(records["row"][first]),
        repeated_row=int(records["row"][first + 1]),
        item_index=int(records["item_index"][first + 1]),
    )
