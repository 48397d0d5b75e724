"""What was measured of a job's models, kept in the store, and what it foretells of a run."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from pipeline.config import Config
from pipeline.features.identity import canonical_json
from pipeline.features.store import FeatureStore
from pipeline.planning.calibration import Calibration, run_seconds, work_seconds
from pipeline.stages.forecast import forecast_work

_READ: dict[str, Any] = {
    "encode": {"dtype", "attention", "max_batch_items", "max_batch_tokens"},
    "generate": True,
    "text": True,
}


def calibration_name(config: Config, device: str) -> str:
    """Where the store keeps what was measured of the job's models under these settings on such a device."""
    settings = config.model_dump(mode="json", include=_READ)
    terms = [config.job, config.model, config.text_model, settings, device, importlib.metadata.version("torch")]
    return f"calibrations/{hashlib.sha256(canonical_json(terms)).hexdigest()[:20]}.json"


def read_calibration(config: Config, device: str) -> Calibration | None:
    """What the store has of it; None without."""
    folder, name = FeatureStore(config.store.path, config.store.local_path).folder, calibration_name(config, device)
    return Calibration.from_json(folder.read_json(name)) if folder.exists(name) else None


def write_calibration(config: Config, rates: Calibration) -> str:
    """Have `read_calibration` find it; where it is."""
    folder = FeatureStore(config.store.path, config.store.local_path).folder
    name = calibration_name(config, rates.device)
    folder.write_json(name, rates.to_json(), indent=2)
    return f"{folder.url}/{name}"


def foretold(config: Config, device: str, counts: Mapping[str, int]) -> dict[str, float] | None:
    """Stage → seconds, summed over workers, of what a run's plans came to, and `total`, of the run; None where nothing
    was measured for it."""
    rates = read_calibration(config, device)
    if rates is None:
        return None
    seconds = work_seconds(forecast_work(counts), rates)
    return {**seconds, "total": run_seconds(seconds, rates)}
