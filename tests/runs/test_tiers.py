"""A run's caches: what they had, what that saved, and what they take."""

from __future__ import annotations

from pipeline.runs.tiers import TierSize, describe_tiers

COUNTS = {
    "frames_reused": 30,
    "frames_missed": 10,
    "frames_fallbacks": 2,
    "frames_saved_ms": 12_500,
    "features_reused": 0,
    "encodes": 40,
    "features_evictions": 3,
    "features_evicted_bytes": 900,
    "items_carried": 5,
    "items_written": 25,
}


def test_each_tier_is_told_of_by_itself() -> None:
    sizes = {"frames": TierSize(num_bytes=7000, max_bytes=8000)}
    assert describe_tiers(COUNTS, "embed_backfill", sizes) == {
        "frames": {
            **{"found": 30, "made": 10, "hit_rate": 0.75, "fallbacks": 2, "evictions": 0, "evicted_bytes": 0},
            **{"saved_seconds": 12.5, "bytes": 7000, "max_bytes": 8000},
        },
        "features": {
            **{"found": 0, "made": 40, "hit_rate": 0.0, "fallbacks": 0, "evictions": 3, "evicted_bytes": 900},
            **{"saved_seconds": 0.0, "bytes": None, "max_bytes": None},
        },
        "vectors": {
            **{"found": 5, "made": 20, "hit_rate": 0.2, "fallbacks": 0, "evictions": 0, "evicted_bytes": 0},
            **{"saved_seconds": None, "bytes": None, "max_bytes": None},
        },
    }


def test_a_job_without_vectors_asked_for_none() -> None:
    found = describe_tiers(COUNTS | {"items_carried": 0}, "caption_videos", {})["vectors"]
    assert (found["found"], found["made"], found["hit_rate"]) == (0, 0, None)
