"""An object store that is slow: 4 KB every hundredth of a second."""

from __future__ import annotations

import time
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class SlowFiles(MemoryFileSystem):  # type: ignore[misc]
    """Whole objects come slowly; what is opened is as fast as memory."""

    protocol = "slow"

    def get_file(self, rpath: str, lpath: str, callback: Any, **options: Any) -> None:
        """As `fsspec` has it: chunk by chunk, and `callback` is told of each."""
        data = self.cat_file(rpath)
        with open(lpath, "wb") as file:
            for start in range(0, len(data), 4096):
                time.sleep(0.01)
                file.write(data[start : start + 4096])
                callback.relative_update(4096)


def register_slow_files() -> None:
    """`slow://` is known to `fsspec` from now on."""
    fsspec.register_implementation("slow", SlowFiles, clobber=True)
