"""Times of items by stage and kind: percentiles over a run of any size, in a few kilobytes."""

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


def stage_times(timings: Iterable[pa.Table]) -> dict[tuple[str, str], Histogram]:
    """(stage, kind of item) → durations, from the `*_ms` columns of a run's timings; nulls are no durations.

    The kind is the column `modality`, `item` in timings without it.
    """
    found: dict[tuple[str, str], Histogram] = {}
    for table in timings:
        kinds = table["modality"].to_numpy(zero_copy_only=False) if "modality" in table.column_names else None
        for name in table.column_names:
            if not name.endswith("_ms"):
                continue
            values = table[name].to_numpy(zero_copy_only=False).astype(np.float64)
            known = ~np.isnan(values)
            for kind in ("item",) if kinds is None else sorted({str(each) for each in kinds[known]}):
                chosen = known if kinds is None else known & (kinds == kind)
                if chosen.any():
                    found.setdefault((name.removesuffix("_ms"), kind), Histogram()).add(values[chosen])
    return found


def waited_longest(times: Mapping[tuple[str, str], Histogram]) -> str | None:
    """The queue in which items waited longest in all; None where no queue was measured."""
    sums: dict[str, float] = {}
    for (stage, _), histogram in times.items():
        if stage.endswith("_queue"):
            sums[stage] = sums.get(stage, 0.0) + histogram.sum_ms
    return max(sums, key=lambda stage: sums[stage]) if any(sums.values()) else None
