"""What a run found in each cache, what it had to make instead, and what that saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# A cache, and the counts of what it had, what was made instead, and what it could not give though it was listed.
_TIERS = {
    "frames": ("frames_reused", "frames_missed", "frames_fallbacks"),
    "features": ("features_reused", "encodes", "fallbacks"),
}
_VECTOR_JOBS = ("embed_backfill", "index_documents")


@dataclass(frozen=True, kw_only=True, slots=True)
class TierSize:
    """What a tier takes where the store lies, and the most that it may; None for what nobody looked at, or bounds."""

    num_bytes: int | None = None
    max_bytes: int | None = None


def describe_tiers(counts: Mapping[str, int], job: str, sizes: Mapping[str, TierSize]) -> dict[str, dict[str, Any]]:
    """By tier `found`, `made`, `hit_rate` (None where nothing was asked for), `fallbacks`, `evictions`,
    `evicted_bytes`, `saved_seconds`, `bytes` and `max_bytes`.

    `saved_seconds` are those of workers: what making the records that were found took once, less what finding them
    took. `vectors` are rows, which the run before has; what they took nobody kept.
    """
    tiers = {}
    for name, (found, made, fallbacks) in _TIERS.items():
        saved = counts.get(f"{name}_saved_ms", 0) / 1e3
        size = sizes.get(name, TierSize())
        tiers[name] = _tier(counts.get(found, 0), counts.get(made, 0), saved, size) | {
            "fallbacks": counts.get(fallbacks, 0),
            "evictions": counts.get(f"{name}_evictions", 0),
            "evicted_bytes": counts.get(f"{name}_evicted_bytes", 0),
        }
    carried = counts.get("items_carried", 0)
    made_rows = counts.get("items_written", 0) - carried if job in _VECTOR_JOBS else 0
    return {**tiers, "vectors": _tier(carried, made_rows, None, TierSize())}


def _tier(found: int, made: int, saved_seconds: float | None, size: TierSize) -> dict[str, Any]:
    return {
        "found": found,
        "made": made,
        "hit_rate": found / (found + made) if found + made else None,
        "fallbacks": 0,
        "evictions": 0,
        "evicted_bytes": 0,
        "saved_seconds": saved_seconds,
        "bytes": size.num_bytes,
        "max_bytes": size.max_bytes,
    }
