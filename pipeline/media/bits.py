"""Bits of a header, one after another. Pure."""

from __future__ import annotations


class Bits:
    """Reads from the highest bit on; raises `IndexError` behind the end."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data
        self._at = 0

    def read(self, count: int) -> int:
        """An unsigned number of so many bits."""
        value = 0
        for _ in range(count):
            value = value << 1 | self._data[self._at >> 3] >> (7 - (self._at & 7)) & 1
            self._at += 1
        return value
