"""`summary.json`: what scripts and schedulers rely on. Fields are added, never renamed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeline.runs.tiers import TierSize, describe_tiers
from pipeline.storage import Folder

SUMMARY_NAME = "summary.json"
COUNTS = (
    "items_written",
    "items_reused",
    "items_quarantined",
    "items_skipped",
    "media_in",
    "fetches",
    "bytes_fetched",
    "fetch_retries",
    "frames_decoded",
    "images_decoded",
    "encodes",
    "features_reused",
    "fallbacks",
    "computed_tokens",
    "padded_tokens",
    "prompt_tokens",
    "prompt_padded_tokens",
    "generated_tokens",
    "decode_slots",
    "idle_decode_slots",
    "pages_decoded",
    "texts_embedded",
    "pairs_scored",
    "texts_scored",
    "text_tokens",
    "text_padded_tokens",
    "items_carried",
    "frames_reused",
    "frames_missed",
    "frames_fallbacks",
    "frames_bytes_read",
    "frames_bytes_written",
    "oom_splits",
    "evictions",
    "evicted_bytes",
)
SANDBOX_COUNT = "sandbox:"  # begins the names of counts: media that a decoder had, by what kept it in
FALLBACK_COUNT = "fallback:"  # as well: claims that did not hold, by shard and its condition
FORECAST_COUNT = "forecast:"  # as well: what written plans come to
# Of those, what a run finds by the same name; and stages whose time is forecast, by the names that seconds have.
FORECAST = ("encodes", "feature_tokens", "computed_tokens", "store_bytes", "prompt_tokens", "text_tokens")
FORECAST_STAGES = {
    "media_decode": ("media_decode",),
    "vision_encode": ("mm_processor", "vision_encode"),
    "commit": ("commit",),
    "feature_transfer": ("feature_transfer",),
    "llm_prefill": ("llm_prefill",),
    "llm_decode": ("llm_decode",),
    "text": ("text_embed", "score"),
}
SECONDS = ("encode_pass", "generate_pass", "pool_pass", "total", "ray_startup")
PACKAGES = ("ray", "torch", "transformers", "av", "pillow")


def build_summary(
    *,
    run_id: str,
    config_digest: str,
    status: str,
    items_in: int,
    counts: Mapping[str, int],
    seconds: Mapping[str, float],
    quarantine: Mapping[str, int],
    environment: Mapping[str, Any],
    store_peak_bytes: int | None,
    points: Mapping[str, int],
    stage_seconds: Mapping[str, float] | None = None,
    sample_fraction: float | None = None,
    cpu_seconds: Mapping[str, float] | None = None,
    accelerator_seconds: Mapping[str, float] | None = None,
    job: str = "",
    tier_sizes: Mapping[str, TierSize] = MappingProxyType({}),
) -> dict[str, Any]:
    """The summary as DESIGN.md names its fields. `counts` are those of the receipts, by these names; absent is 0.

    `store_peak_bytes` is None when the store was not looked at. `points` are those that vector stores hold, by table.
    `stage_seconds` are those that a calibration foretold, None without one; `sample_fraction` is None for all items.
    `cpu_seconds` and `accelerator_seconds` are those of items, by stage: what receipts say. `job` and `tier_sizes` are
    what `describe_tiers` asks for. Its `sandbox` counts media that a decoder had, by what kept it in; its
    `fallback_shards` what the catalogue listed and was encoded again, by shard and the shard's condition; its
    `forecast` has what written plans came to beside what was found.

    Raises `RuntimeError` when the items do not add up: one was lost or counted twice, and no number can be trusted.
    """
    known = {name: counts.get(name, 0) for name in COUNTS}
    accounted = known["items_written"] + known["items_quarantined"] + known["items_skipped"]
    if items_in != accounted:
        raise RuntimeError(
            f"run {run_id} does not add up: {items_in} items in, but {known['items_written']} written + "
            f"{known['items_quarantined']} quarantined + {known['items_skipped']} skipped = {accounted}"
        )
    return {
        "run_id": run_id,
        "config_digest": config_digest,
        "status": status,
        "items_in": items_in,
        **known,
        "seconds": {**dict.fromkeys(SECONDS, 0.0), **seconds},
        "quarantine": dict(quarantine),
        "forecast": _forecast(counts, seconds, stage_seconds or {}),
        "environment": dict(environment),
        "store_peak_bytes": store_peak_bytes,
        "points": dict(points),
        "sandbox": {
            name.removeprefix(SANDBOX_COUNT): count for name, count in counts.items() if name.startswith(SANDBOX_COUNT)
        },
        "fallback_shards": {
            name.removeprefix(FALLBACK_COUNT): count
            for name, count in counts.items()
            if name.startswith(FALLBACK_COUNT)
        },
        "sample_fraction": sample_fraction,
        "cpu_seconds": dict(cpu_seconds or {}),
        "accelerator_seconds": dict(accelerator_seconds or {}),
        "tiers": describe_tiers(counts, job, tier_sizes),
    }


def _forecast(
    counts: Mapping[str, int], seconds: Mapping[str, float], stage_seconds: Mapping[str, float]
) -> dict[str, Any]:
    """Name → `forecast` and `found`; `decode_core_seconds` are of the reference core, `seconds` those of stages."""
    planned = {name.removeprefix(FORECAST_COUNT): n for name, n in counts.items() if name.startswith(FORECAST_COUNT)}
    pairs: dict[str, Any] = {
        name: {"forecast": planned.get(name, 0), "found": counts.get(name, 0)}
        for name in FORECAST
        if name in planned or (planned and (counts.get(name) or (name == "encodes" and counts.get("media_in"))))
    }
    decode_ms = planned.get("decode_core_ms")
    if decode_ms is not None:
        pairs["decode_core_seconds"] = {"forecast": decode_ms / 1e3, "found": seconds.get("media_decode", 0.0)}
    if stage_seconds:
        pairs["seconds"] = {
            stage: {"forecast": stage_seconds[stage], "found": sum(seconds.get(name, 0.0) for name in names)}
            for stage, names in FORECAST_STAGES.items()
            if stage in stage_seconds
        }
        pairs["seconds"]["total"] = {"forecast": stage_seconds["total"], "found": seconds["total"]}
    return pairs


def write_summary(folder: Folder, summary: Mapping[str, Any]) -> None:
    """Publish `summary.json`; a run that has it has ended."""
    folder.write_json(SUMMARY_NAME, dict(summary), indent=2)


def describe_environment(devices: Sequence[str]) -> dict[str, Any]:
    """What the bits of the results depend on. `devices` names the accelerators; packages not installed are null."""
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu_model": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "devices": list(devices),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
