"""When a window that is encoded may count as done: committed is enough on one machine, not where a node can be lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

_LOOK_SECONDS = 1.0  # a look costs a request or two for each shard that is waited for


class DurableWindows:
    """Windows whose receipts are all in, held back until every shard that was written for them is sealed."""

    def __init__(self, is_sealed: Callable[[str], bool]) -> None:
        self._is_sealed = is_sealed
        self._waiting: dict[int, set[str]] = {}
        self._sealed: set[str] = set()
        self._next_look = 0.0

    def add(self, window: int, shards: Iterable[str]) -> None:
        """Hold `window` back for `shards`; for none it is durable at once."""
        self._waiting[window] = set(shards) - self._sealed

    @property
    def shards(self) -> set[str]:
        """Those that are waited for."""
        return set().union(*self._waiting.values())

    def drop(self, windows: Iterable[int]) -> None:
        """Hold `windows` no longer: some of what was written for them is lost, and will be written anew."""
        for window in windows:
            self._waiting.pop(window, None)

    def take(self, *, look: bool = False) -> list[int]:
        """Windows that have become durable since, each once. Looks at the shards once a second, or now with `look`."""
        if look or time.monotonic() >= self._next_look:
            self._sealed.update(shard for shard in self.shards if self._is_sealed(shard))
            self._next_look = time.monotonic() + _LOOK_SECONDS
        for shards in self._waiting.values():
            shards -= self._sealed
        durable = [window for window, shards in self._waiting.items() if not shards]
        for window in durable:
            del self._waiting[window]
        return durable
