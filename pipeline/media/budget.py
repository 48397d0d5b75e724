"""Admission: what one media item, and one request, may cost, decided from headers alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from pipeline.errors import ConfigError, ItemError
from pipeline.schema import ResourceVector


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Published upper limits. An item over any of them is quarantined with the code `over_budget_<limit>`."""

    max_bytes: int
    max_pixels_per_frame: int
    max_total_pixels: int
    max_frames: int
    max_duration_seconds: float
    max_samples: int
    max_feature_tokens: int
    max_decode_seconds: float
    max_media_per_request: int


# Chosen so that one worker's peak stays bounded, not measured against a corpus: 64 MP is the largest phone
# sensor binned once; 256 frames of 4K is 2.1 GP; four hours at 48 kHz in stereo are 1.4 G samples. 256 frames of four
# hours of 4K with a keyframe every 250 are estimated at 5 minutes of decoding, and estimates may be twice the truth.
TIERS: dict[str, Budget] = {
    "default": Budget(
        max_bytes=512 * 2**20,
        max_pixels_per_frame=64 * 10**6,
        max_total_pixels=2_200 * 10**6,
        max_frames=256,
        max_duration_seconds=4 * 3600.0,
        max_samples=1_500 * 10**6,
        max_feature_tokens=32_768,
        max_decode_seconds=600.0,
        max_media_per_request=16,
    ),
    "trusted_batch_job": Budget(
        max_bytes=16 * 2**30,
        max_pixels_per_frame=256 * 10**6,
        max_total_pixels=20_000 * 10**6,
        max_frames=2_048,
        max_duration_seconds=24 * 3600.0,
        max_samples=20_000 * 10**6,
        max_feature_tokens=262_144,
        max_decode_seconds=7_200.0,
        max_media_per_request=256,
    ),
}

_ITEM_LIMITS = (
    ("bytes", "num_bytes", "max_bytes", "bytes"),
    ("pixels", "pixels_per_frame", "max_pixels_per_frame", "pixels a frame"),
    ("frames", "num_frames", "max_frames", "sampled frames"),
    ("total_pixels", "total_pixels", "max_total_pixels", "pixels in all sampled frames"),
    ("duration", "duration_seconds", "max_duration_seconds", "seconds"),
    ("samples", "num_samples", "max_samples", "samples of sound in all channels"),
    ("feature_tokens", "feature_tokens", "max_feature_tokens", "feature tokens"),
    ("decode", "decode_seconds", "max_decode_seconds", "estimated seconds of decoding"),
)


def resolve_budget(tier: str, overrides: dict[str, Any]) -> Budget:
    """The tier's limits with single limits replaced. Raises `ConfigError` for an unknown tier or limit."""
    if tier not in TIERS:
        raise ConfigError(f"budget {tier!r} is not known; the tiers are {', '.join(TIERS)}")
    known = {f.name for f in fields(Budget)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ConfigError(f"budget limit {unknown[0]!r} is not known; the limits are {', '.join(sorted(known))}")
    return replace(TIERS[tier], **overrides)


def admit(vector: ResourceVector, budget: Budget) -> None:
    """Raise `ItemError` (stage `admit`) naming the first limit that `vector` passes."""
    for code, quantity, limit, unit in _ITEM_LIMITS:
        asked, allowed = getattr(vector, quantity), getattr(budget, limit)
        if asked > allowed:
            raise ItemError(
                "admit", f"over_budget_{code}", f"{asked:,} {unit}, the budget allows {allowed:,} ({limit})"
            )


def admit_request(num_media: int, budget: Budget) -> None:
    """Raise `ItemError` (stage `admit`) when a request carries more media items than allowed."""
    if num_media > budget.max_media_per_request:
        raise ItemError(
            "admit",
            "over_budget_media",
            f"{num_media} media items in one request, the budget allows {budget.max_media_per_request} "
            "(max_media_per_request)",
        )
