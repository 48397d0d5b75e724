"""What a check of checkpoints found, remembered in the store: a later run of the same need not load them to know.

Only of checkpoints that are folders: what a hub's name stands for may change.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.config import Config
from pipeline.features.identity import canonical_json
from pipeline.features.store import FeatureStore
from pipeline.models.location import folder_digest, resolve_model
from pipeline.stages.identity import CheckedModel

_CHECKED = TypeAdapter(CheckedModel)
_READ: dict[str, Any] = {
    "job": True,
    "pooling": True,
    "text": True,
    "score": True,
    "sampling": {"policy"},
    "decode": {"resize", "background", "truncated"},
    "encode": {"dtype", "attention"},
    "generate": {"dtype", "attention", "system"},
}


def known_check(config: Config, device: str) -> CheckedModel | None:
    """What an earlier run found of the same files under the same settings and versions; None when there was none."""
    name, folder = _name(config, device), FeatureStore(config.store.path, config.store.local_path).folder
    if name is None or not folder.exists(name):
        return None
    try:
        return _CHECKED.validate_json(folder.read_bytes(name))
    except ValidationError:  # of a version of headrace that kept something else
        return None


def remember_check(config: Config, device: str, checked: CheckedModel) -> None:
    """Have `known_check` find it."""
    name = _name(config, device)
    if name is not None:
        folder = FeatureStore(config.store.path, config.store.local_path).folder
        folder.write_bytes(name, _CHECKED.dump_json(checked))


def _name(config: Config, device: str) -> str | None:
    folders = [folder_digest(resolve_model(model)) for model in (config.model, config.text_model)]
    if None in folders:
        return None
    versions = [importlib.metadata.version(package) for package in ("headrace", "torch", "transformers")]
    terms = [folders, config.model_dump(mode="json", include=_READ), device, versions]
    return f"models/check-{hashlib.sha256(canonical_json(terms)).hexdigest()[:20]}.json"
