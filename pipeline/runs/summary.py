"""`summary.json`: what scripts and schedulers rely on. Fields are added, never renamed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    "oom_splits",
)
SANDBOX_COUNT = "sandbox:"  # begins the names of counts: media that a decoder had, by what kept it in
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
) -> dict[str, Any]:
    """The summary as DESIGN.md names its fields. `counts` are those of the receipts, by these names; absent is 0.

    `store_peak_bytes` is None when the store was not looked at. `points` are those that vector stores hold, by table.
    Its `sandbox` counts media that a decoder had, by what kept it in.

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
        "forecast": {},
        "environment": dict(environment),
        "store_peak_bytes": store_peak_bytes,
        "points": dict(points),
        "sandbox": {
            name.removeprefix(SANDBOX_COUNT): count for name, count in counts.items() if name.startswith(SANDBOX_COUNT)
        },
    }


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
