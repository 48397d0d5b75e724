"""Times of items by stage, kind and size: percentiles over a run of any size, in a few kilobytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

# Bounds of the bins grow by 2 %, from a microsecond to a week: a percentile is off by 1 % at most.
_GROWTH = math.log(1.02)
_LEAST_MS = 1e-3
_BINS = 1 + math.ceil(math.log(7 * 86_400e3 / _LEAST_MS) / _GROWTH)


@dataclass(slots=True)
class Histogram:
    """Counts of durations in ms by size."""

    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BINS, np.int64))
    sum_ms: float = 0.0

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    def add(self, times_ms: npt.NDArray[np.float64]) -> None:
        """Take in durations of 0 ms and more."""
        places = np.log(np.maximum(times_ms, _LEAST_MS) / _LEAST_MS) / _GROWTH
        self.counts += np.bincount(np.minimum(places.astype(np.int64), _BINS - 1), minlength=_BINS)
        self.sum_ms += float(times_ms.sum())

    def percentile(self, share: float) -> float:
        """The duration in ms that `share` (0 to 1) of all do not exceed, within 1 %. Raises `ValueError` for none."""
        if not self.count:
            raise ValueError("no durations, no percentile")
        rank = max(1, math.ceil(share * self.count))
        place = int(np.searchsorted(np.cumsum(self.counts), rank))
        return _LEAST_MS * math.exp((place + 0.5) * _GROWTH)


@dataclass(frozen=True, slots=True, order=True)
class Timed:
    """What durations are of: a stage, a kind of item, and items of at most so many encoder tokens.

    `encoder_tokens` is a power of two; 0 for items without any, and where timings do not tell.
    """

    stage: str
    kind: str
    encoder_tokens: int = 0


def stage_times(timings: Iterable[pa.Table]) -> dict[Timed, Histogram]:
    """Durations from the `*_ms` columns of a run's timings; nulls are no durations.

    The kind is the column `modality`, `item` in timings without it; the size is of the column `encoder_tokens`.
    """
    found: dict[Timed, Histogram] = {}
    for table in timings:
        groups = _groups(table)
        for name in table.column_names:
            if not name.endswith("_ms"):
                continue
            values = table[name].to_numpy(zero_copy_only=False).astype(np.float64)
            known = ~np.isnan(values)
            for (kind, size), rows in groups.items():
                chosen = values[rows][known[rows]]
                if len(chosen):
                    found.setdefault(Timed(name.removesuffix("_ms"), kind, size), Histogram()).add(chosen)
    return found


def _groups(table: pa.Table) -> dict[tuple[str, int], npt.NDArray[np.int64]]:
    """(kind, bound of the size) → numbers of the rows."""
    names = table.column_names
    kinds = table["modality"].to_pylist() if "modality" in names else ["item"] * len(table)
    sizes = table["encoder_tokens"].to_pylist() if "encoder_tokens" in names else [None] * len(table)
    groups: dict[tuple[str, int], list[int]] = {}
    for row, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        groups.setdefault((kind, 1 << (size - 1).bit_length() if size else 0), []).append(row)
    return {group: np.array(rows) for group, rows in groups.items()}


def waited_longest(times: Mapping[Timed, Histogram]) -> str | None:
    """The queue in which items waited longest in all; None where no queue was measured."""
    sums: dict[str, float] = {}
    for timed, histogram in times.items():
        if timed.stage.endswith("_queue"):
            sums[timed.stage] = sums.get(timed.stage, 0.0) + histogram.sum_ms
    return max(sums, key=lambda stage: sums[stage]) if any(sums.values()) else None
