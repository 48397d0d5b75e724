"""The ledger: which windows a run has finished, one small file each, append-only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipeline.storage import Folder

_FOLDER = "_run/ledger"
_READ_THREADS = 16  # a resumed run of 10,000 windows waits for as many small objects


class Ledger:
    """A run's finished windows, by pass and sink. Object stores cannot append to a file, so a line is a file."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def record(self, pass_name: str, window: int, entry: Mapping[str, Any]) -> None:
        """Put down that a window is finished. `entry`: `Totals.to_entry()`, and what else JSON holds.

        A window's first line stands: recording it again changes nothing.
        """
        if not self.has(pass_name, window):
            self._folder.write_json(_name(pass_name, window), dict(entry))

    def has(self, pass_name: str, window: int) -> bool:
        """Whether the window is finished; asks for nothing but its own line."""
        return self._folder.exists(_name(pass_name, window))

    def read(self, pass_name: str, window: int) -> dict[str, Any]:
        """A finished window's entry. Raises `FileNotFoundError` when it is not finished."""
        return dict(self._folder.read_json(_name(pass_name, window)))

    def replace(self, pass_name: str, window: int, entry: Mapping[str, Any]) -> None:
        """Put down another entry for a window, whose items were counted anew."""
        self._folder.write_json(_name(pass_name, window), dict(entry))

    def forget(self, pass_name: str, window: int) -> None:
        """Take a line back: what it vouched for is gone."""
        self._folder.remove(_name(pass_name, window))

    def finished(self, pass_name: str) -> dict[int, dict[str, Any]]:
        """Window → entry, ascending."""
        windows = self.windows(pass_name)
        with ThreadPoolExecutor(_READ_THREADS) as pool:
            entries = pool.map(lambda window: self._folder.read_json(_name(pass_name, window)), windows)
            return dict(zip(windows, entries, strict=True))

    def windows(self, pass_name: str) -> list[int]:
        """The windows of `finished`, without their entries."""
        matches = (re.fullmatch(rf"{pass_name}-(\d+)\.json", name) for name in self._folder.list(_FOLDER))
        return sorted(int(match[1]) for match in matches if match)


def _name(pass_name: str, window: int) -> str:
    return f"{_FOLDER}/{pass_name}-{window:06d}.json"
