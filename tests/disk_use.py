"""How much disk a folder takes while something else is going on."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import TracebackType


def disk_use(folder: Path) -> int:
    """Bytes of the blocks of every file below; what is deleted and still open is not counted."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


class Watch:
    """Looks at a folder every few milliseconds; `peak` is the most it was seen to take, `looks` how often it looked."""

    def __init__(self, folder: Path, every_seconds: float) -> None:
        self.peak = 0
        self.looks = 0
        self._folder = folder
        self._every_seconds = every_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._ended.is_set():
            self.peak = max(self.peak, disk_use(self._folder))
            self.looks += 1
            time.sleep(self._every_seconds)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
