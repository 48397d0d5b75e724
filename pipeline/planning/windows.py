"""Windows: contiguous ranges of `item_index`, fixed by configuration and manifest alone. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Items `start` (included) to `stop` (excluded)."""

    index: int
    start: int
    stop: int


def full_window_items(max_batch_items: int) -> int:
    """Items of a window that batches of up to `max_batch_items` fill to 95 % or more.

    The last batch of a window is half full in the mean: of W items in batches of B that is 1 / (1 + B / 2W), if the
    rest are full, and what W = 10 * B is for. At least 4,096, for tokens fill most batches long before items do.
    """
    return max(4096, 10 * max_batch_items)


def plan_windows(num_items: int, *, first_items: int, full_items: int) -> list[Window]:
    """All windows of a run: `first_items`, doubling up to `full_items`, so that the first accelerator starts early."""
    windows: list[Window] = []
    start, size = 0, min(first_items, full_items)
    while start < num_items:
        stop = min(start + size, num_items)
        windows.append(Window(index=len(windows), start=start, stop=stop))
        start, size = stop, min(2 * size, full_items)
    return windows


def segments(windows: list[Window], windows_per_segment: int) -> list[list[Window]]:
    """Runs of windows that are encoded, generated, written and released together."""
    return [windows[i : i + windows_per_segment] for i in range(0, len(windows), windows_per_segment)]


def num_fitting(sizes: Sequence[int], room: int, limit: int) -> int:
    """How many of the windows ahead, of these sizes and in this order, fit into `room` together; at most `limit`."""
    totals = itertools.accumulate(sizes[:limit])
    return sum(1 for _ in itertools.takewhile(lambda total: total <= room, totals))
