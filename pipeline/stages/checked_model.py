"""A checkpoint is checked and its encoder's identity worked out once a precision; the store remembers both."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.features.store import FeatureStore
from pipeline.models.self_check import usable_modalities
from pipeline.models.vision_encoder import VisionEncoder
from pipeline.models.vision_language import VisionLanguageFacts, resolve_model
from pipeline.schema import Modality
from pipeline.stages.identity import EncoderIdentity


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedModel:
    """The encoder's terms of every feature key, and modality → "" or why this checkpoint cannot be used with it."""

    identity: EncoderIdentity
    verdicts: dict[Modality, str]


def checked_model(config: Config, device: str) -> CheckedModel:
    """Loads the checkpoint on `device` the first time. Raises `ConfigError` when it cannot be loaded or used."""
    facts = VisionLanguageFacts.load(config.model)
    known = _known(config, facts, device)
    identity = EncoderIdentity(
        weights=known["weights"],
        processor=facts.processor_digest,
        placeholder=facts.placeholder_digest,
        precision=config.encode.dtype,
    )
    return CheckedModel(identity=identity, verdicts=known["verdicts"])


def _known(config: Config, facts: VisionLanguageFacts, device: str) -> dict[str, Any]:
    folder = FeatureStore(config.store.path, config.store.local_path).folder
    dtype = config.encode.dtype
    name = f"models/{_checkpoint(facts)}-{dtype}-transformers-{importlib.metadata.version('transformers')}.json"
    if not folder.exists(name):
        verdicts = usable_modalities(facts, dtype=dtype, device=device)
        weights = VisionEncoder(facts, dtype=dtype, device="cpu").weights_digest()
        folder.write_json(name, {"weights": weights, "verdicts": verdicts, "model": config.model})
    return dict(folder.read_json(name))


def _checkpoint(facts: VisionLanguageFacts) -> str:
    """What changes when the files do: the hub's commit, or names, sizes and times of a folder's files."""
    path = resolve_model(facts.model)
    terms: Any = [path, getattr(facts.config, "_commit_hash", None)]
    if os.path.isdir(path):
        terms = [(str(f.relative_to(path)), f.stat().st_size, f.stat().st_mtime_ns) for f in _files(path)]
    return hashlib.sha256(repr(terms).encode()).hexdigest()[:16]


def _files(path: str) -> list[Path]:
    return sorted(f for f in Path(path).rglob("*") if f.is_file())
