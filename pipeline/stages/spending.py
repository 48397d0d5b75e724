"""What a stage takes for an item: when, processor and accelerator time, bytes; shares of what a batch shares."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

# Of an outcome's row: when its batch was taken (seconds since the epoch) and for how long, and the item's share.
SPENT = (
    ("started_at", pa.float64()),
    ("seconds", pa.float64()),
    ("cpu_seconds", pa.float64()),
    ("accelerator_seconds", pa.float64()),
)


class CpuClock:
    """Processor time of this process, all its threads, and its children; of children that live, those it is told of."""

    def __init__(self, children: Callable[[], Iterable[int]] = tuple) -> None:
        self._children = children
        self._last = self._read()

    def take(self) -> float:
        """Seconds since the last time, or since it was made."""
        now = self._read()
        taken, self._last = max(0.0, now - self._last), now
        return taken

    def _read(self) -> float:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)  # of children that were waited for
        alive = sum(map(_process_seconds, self._children()))
        return time.process_time() + ended.ru_utime + ended.ru_stime + alive


def _process_seconds(pid: int) -> float:
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the clock of a process: clock_getcpuclockid(3)
    except OSError:  # it has ended since
        return 0.0


class Spending:
    """From when a window is planned on."""

    def __init__(self, children: Callable[[], Iterable[int]] = tuple) -> None:
        self._started_at, self._started = time.time(), time.perf_counter()
        self._clock = CpuClock(children)

    def spent(self, bytes_fetched: Mapping[int, int] | None = None) -> dict[str, Any]:
        """As written plans hold it: `started_at`, `seconds`, `cpu_seconds`, and the `bytes_fetched` for an item.

        To be asked once. Each item of the window has the same share of the processor time.
        """
        return {
            "started_at": self._started_at,
            "seconds": time.perf_counter() - self._started,
            "cpu_seconds": self._clock.take(),
            "bytes_fetched": {str(item): each for item, each in (bytes_fetched or {}).items() if each},
        }


def shares(total: float, weights: Sequence[float]) -> list[float]:
    """`total` by weights of 0 and more, which come to it together; equal ones when nothing weighs anything."""
    whole = sum(weights)
    return [total * weight / whole if whole else total / len(weights) for weight in weights]


def batch_spent(
    started_at: float, cpu_seconds: float, accelerator_seconds: float, weights: Sequence[float]
) -> list[dict[str, float]]:
    """The fields of `SPENT` of each of a batch's items, which is done now."""
    seconds = time.time() - started_at
    cpu, accelerator = shares(cpu_seconds, weights), shares(accelerator_seconds, weights)
    return [
        {"started_at": started_at, "seconds": seconds, "cpu_seconds": c, "accelerator_seconds": a}
        for c, a in zip(cpu, accelerator, strict=True)
    ]


def on_accelerator(device: str, *seconds: float) -> float:
    """Those of a batch's `seconds` that it had the accelerator for, added up; 0 without one."""
    return 0.0 if device == "cpu" else sum(seconds)
