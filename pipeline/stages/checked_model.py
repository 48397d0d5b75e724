"""A checkpoint is checked and its encoder's identity worked out once a precision; the store remembers both."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

from pipeline.config import Config
from pipeline.features.store import FeatureStore
from pipeline.models.checkpoint import checkpoint_name
from pipeline.models.halves import count_parameters
from pipeline.models.location import resolve_model
from pipeline.models.network import network_of
from pipeline.models.prompt_embedder import is_vision_language
from pipeline.models.self_check import check_halves
from pipeline.models.vision_encoder import VisionEncoder
from pipeline.models.vision_language import VisionLanguageFacts
from pipeline.schema import RecordSize, VectorSpaces
from pipeline.stages.checked_vectors import (
    checked_image_classifier,
    checked_scorer,
    checked_vectors,
    prompted_space,
)
from pipeline.stages.identity import CheckedModel, EncoderIdentity
from pipeline.stages.known_check import remember_check


def checked_model(config: Config, device: str) -> CheckedModel:
    """Loads the checkpoint on `device` the first time. Raises `ConfigError` when it cannot be loaded or used."""
    checked = _check(config, device)
    remember_check(config, device, checked)
    return checked


def _check(config: Config, device: str) -> CheckedModel:
    if config.job in ("rerank", "score_texts"):
        return checked_scorer(config)
    if config.job == "score_media":
        return checked_image_classifier(config, device)
    prompted = config.job == "embed_backfill" and is_vision_language(config.model)
    if config.job != "caption_videos" and not prompted:
        return checked_vectors(config)
    checked = _checked_halves(config, device)
    if not prompted:
        return checked
    space = prompted_space(config, checked.identity)
    return dataclasses.replace(checked, vectors=VectorSpaces(media=space, text=space))


def _checked_halves(config: Config, device: str) -> CheckedModel:
    facts = VisionLanguageFacts.load(config.model)
    if config.sampling.policy == "model":
        facts.check_sampling()
    known = _known(config, facts, device)
    identity = EncoderIdentity(
        weights=known["weights"],
        processor=facts.processor_digest,
        placeholder=facts.placeholder_digest,
        precision=config.encode.dtype,
        dct_scaled=config.decode.resize == "fast",
        at_keyframes=config.sampling.policy == "keyframes",
        image=config.decode.image_rules,
    )
    return CheckedModel(
        identity=identity,
        verdicts=known["verdicts"],
        rules=facts.rules,
        own_size_rules=facts.own_size_rules,
        sizes={modality: RecordSize(**size) for modality, size in known["sizes"].items()},
        parameters=known["parameters"],
        networks={
            "encoder": network_of(facts.config.vision_config, known["parameters"]["encoder"]),
            "language": network_of(facts.config.get_text_config(), known["parameters"]["language"]),
        },
    )


def _known(config: Config, facts: VisionLanguageFacts, device: str) -> dict[str, Any]:
    folder = FeatureStore(config.store.path, config.store.local_path).folder
    dtype = config.encode.dtype
    version = importlib.metadata.version("transformers")
    name = f"models/{checkpoint_name(resolve_model(config.model))}-{dtype}-transformers-{version}.json"
    known = dict(folder.read_json(name)) if folder.exists(name) else {}
    if "sizes" not in known:  # or the store was written before they were measured
        known = {
            **dataclasses.asdict(check_halves(facts, dtype=dtype, device=device)),
            "weights": VisionEncoder(facts, dtype=dtype, device="cpu").weights_digest(),
            "parameters": count_parameters(resolve_model(facts.model)),
            "model": config.model,
        }
        folder.write_json(name, known)
    return known
