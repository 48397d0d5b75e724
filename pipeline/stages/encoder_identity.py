"""Works out an encoder's identity; the digest of its weights is kept in the store, once a checkpoint and precision."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.features.store import FeatureStore
from pipeline.models.vision_encoder import VisionEncoder
from pipeline.models.vision_language import VisionLanguageFacts, resolve_model
from pipeline.stages.identity import EncoderIdentity


def encoder_identity(config: Config) -> EncoderIdentity:
    """The encoder's terms of every feature key. Raises `ConfigError` when the model cannot be loaded."""
    facts = VisionLanguageFacts.load(config.model)
    return EncoderIdentity(
        weights=_weights(config, facts),
        processor=facts.processor_digest,
        placeholder=facts.placeholder_digest,
        precision=config.encode.dtype,
    )


def _weights(config: Config, facts: VisionLanguageFacts) -> str:
    folder = FeatureStore(config.store.path, config.store.local_path).folder
    name = f"models/{_checkpoint(facts)}-{config.encode.dtype}.json"
    if folder.exists(name):
        return str(folder.read_json(name)["weights"])
    digest = VisionEncoder(facts, dtype=config.encode.dtype, device="cpu").weights_digest()
    folder.write_json(name, {"weights": digest, "model": config.model})
    return digest


def _checkpoint(facts: VisionLanguageFacts) -> str:
    """What changes when the files do: the hub's commit, or names, sizes and times of a folder's files."""
    path = resolve_model(facts.model)
    terms: Any = [path, getattr(facts.config, "_commit_hash", None)]
    if os.path.isdir(path):
        terms = [(str(f.relative_to(path)), f.stat().st_size, f.stat().st_mtime_ns) for f in _files(path)]
    return hashlib.sha256(repr(terms).encode()).hexdigest()[:16]


def _files(path: str) -> list[Path]:
    return sorted(f for f in Path(path).rglob("*") if f.is_file())
