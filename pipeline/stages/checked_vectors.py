"""What a run that makes vectors or scores needs to know of its checkpoints; the store remembers their digests."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.features.codec import encode_record
from pipeline.features.identity import canonical_json
from pipeline.features.store import FeatureStore
from pipeline.media.resize import Resample
from pipeline.models.checkpoint import checkpoint_name
from pipeline.models.dual_encoder import DualEncoderFacts, ImageTower
from pipeline.models.embedder import FrameVectors, TextSide, is_dual_encoder
from pipeline.models.image_classifier import CONTRACT, ImageClassifier, ImageClassifierFacts
from pipeline.models.location import resolve_model
from pipeline.models.network import network_of
from pipeline.models.prompt_embedder import PromptEmbedder, hidden_size, prompt_contract
from pipeline.models.reranker import Scorer, ScorerFacts
from pipeline.models.vision_language import VisionLanguageFacts
from pipeline.planning.estimate import Network
from pipeline.schema import Geometry, Modality, RecordSize, ScoreSpace, VectorSpace, VectorSpaces
from pipeline.stages.identity import CheckedModel, EncoderIdentity

_MODALITIES: tuple[Modality, ...] = ("image", "video", "page")
_NO_ENCODER = EncoderIdentity(weights="", processor="", placeholder="", precision="")


def checked_vectors(config: Config) -> CheckedModel:
    """Of a job that embeds. Loads the checkpoints the first time. Raises `ConfigError` for what cannot be used."""
    dual = is_dual_encoder(config.model)
    if not dual and config.text.model is not None:
        raise ConfigError(
            f"model {config.model!r} embeds texts, and so does text.model {config.text.model!r}: text.model is for "
            "jobs whose model embeds media; leave one out"
        )
    text = _text_space(config)
    if not dual:
        return CheckedModel(
            kind="text",
            identity=_NO_ENCODER,
            verdicts={},
            rules={},
            sizes={},
            parameters={"encoder": 0, "text": text[1].parameters},
            networks={"text": text[1]},
            vectors=VectorSpaces(media=None, text=text[0]),
        )
    facts = DualEncoderFacts.load(config.model, config.pooling.contract())
    known = _remembered(config, config.model, "image", config.encode.dtype, lambda: _weigh(_image_tower(config, facts)))
    identity = _frame_identity(config, known["weights"], facts.image_digest, facts.sizing.resample)
    size = _record_size(facts.dimensions)
    media = VectorSpace(
        model=config.model,
        dimensions=facts.dimensions,
        contract={**facts.image_contract.as_dict(), "video": config.pooling.video},
        digest=identity.digest(),
    )
    return CheckedModel(
        kind="dual_encoder",
        identity=identity,
        verdicts=dict.fromkeys(_MODALITIES, ""),
        rules=dict.fromkeys(_MODALITIES, facts.image_rule),
        sizes=dict.fromkeys(_MODALITIES, size),
        parameters={"encoder": known["parameters"], "text": text[1].parameters},
        networks={"encoder": network_of(facts.config.vision_config, known["parameters"]), "text": text[1]},
        vectors=VectorSpaces(media=media, text=text[0]),
    )


def prompted_space(config: Config, identity: EncoderIdentity) -> VectorSpace:
    """Where vectors of prompts lie, with media in them or not. Raises `ConfigError` for a contract that cannot be."""
    facts, section = VisionLanguageFacts.load(config.model), config.generate
    contract = prompt_contract(config.pooling.contract())
    kept, size = contract.output.dimensions, hidden_size(facts)
    if contract.method != "last_token" or (kept is not None and kept > size):
        raise ConfigError(
            f"model {config.model!r} makes vectors of {size} numbers by its last token, got {contract.as_dict()}"
        )

    def weigh() -> dict[str, Any]:
        return _weigh(PromptEmbedder(facts, contract, dtype=section.dtype, device="cpu"))

    known = _remembered(config, config.model, "language", section.dtype, weigh)
    terms = [identity.digest(), known["weights"], section.dtype, section.system, contract.as_dict()]
    return VectorSpace(
        model=config.model,
        dimensions=kept or size,
        contract=contract.as_dict(),
        digest=hashlib.sha256(canonical_json(terms)).hexdigest()[:16],
    )


def checked_scorer(config: Config) -> CheckedModel:
    """Of a job that scores or ranks. Raises `ConfigError` for what cannot be used."""
    facts = ScorerFacts.load(config.model, config.pooling.contract(), **config.scorer_options())
    if config.job == "rerank" and len(facts.labels) != 1:
        raise ConfigError(
            f"model {config.model!r} gives scores of {', '.join(facts.labels)}: documents are ranked by one score"
        )
    dtype = config.text.dtype
    part = "token-scorer" if config.score.per_token else "scorer"
    known = _remembered(config, config.model, part, dtype, lambda: _weigh(Scorer(facts, dtype=dtype, device="cpu")))
    identity = EncoderIdentity(
        weights=known["weights"], processor=facts.processing_digest, placeholder="", precision=dtype
    )
    return CheckedModel(
        kind="scorer",
        identity=identity,
        scores=ScoreSpace(
            model=config.model,
            labels=facts.labels,
            activation=facts.activation,
            contract=facts.contract.as_dict(),
            digest=identity.digest(),
        ),
        verdicts={},
        rules={},
        sizes={},
        parameters={"encoder": 0, "text": known["parameters"]},
        networks={"text": network_of(facts.config.get_text_config(), known["parameters"])},
    )


def checked_image_classifier(config: Config, device: str) -> CheckedModel:
    """Of a job that scores media. Loads the checkpoint on `device` the first time. Raises `ConfigError` as those do."""
    if config.pooling.contract():
        raise ConfigError(f"model {config.model!r} has a head of its own: there is no pooling that can be given")
    facts, section = ImageClassifierFacts.load(config.model), config.encode

    def check() -> dict[str, Any]:
        classifier = ImageClassifier(facts, dtype=section.dtype, device=device, attention=section.attention)
        classifier.check()
        return _weigh(classifier)

    known = _remembered(config, config.model, "image-classifier", section.dtype, check)
    identity = _frame_identity(config, known["weights"], facts.processor_digest, facts.sizing.resample)
    activation = facts.activation(config.score.activation)
    contract = {**CONTRACT.as_dict(), "video": config.score.video}
    return CheckedModel(
        kind="image_classifier",
        identity=identity,
        verdicts=dict.fromkeys(_MODALITIES, ""),
        rules=dict.fromkeys(_MODALITIES, facts.image_rule),
        sizes=dict.fromkeys(_MODALITIES, _record_size(len(facts.labels))),
        parameters={"encoder": known["parameters"]},
        networks={
            "encoder": network_of(getattr(facts.config, "vision_config", facts.config), known["parameters"]),
        },
        scores=ScoreSpace(
            model=config.model,
            labels=facts.labels,
            activation=activation,
            contract=contract,
            digest=hashlib.sha256(canonical_json([identity.digest(), activation, contract])).hexdigest()[:16],
        ),
    )


def _frame_identity(config: Config, weights: str, processor: str, resample: Resample) -> EncoderIdentity:
    """Of a network that looks at each frame by itself. Raises `ConfigError` where it is to choose them."""
    if config.sampling.policy == "model":
        raise ConfigError(
            f"model {config.model!r} has no video processor that chooses frames; set sampling.policy to fps or uniform"
        )
    return EncoderIdentity(
        weights=weights,
        processor=processor,
        placeholder="none",
        precision=config.encode.dtype,
        resample=resample,
        dct_scaled=config.decode.resize == "fast",
        at_keyframes=config.sampling.policy == "keyframes",
        image=config.decode.image_rules,
    )


def _text_space(config: Config) -> tuple[VectorSpace, Network]:
    """Where texts' vectors lie, and what makes them."""
    section = config.text
    side = TextSide.load(config.text_model, config.text_pooling(), section.prompt_name)

    def weigh() -> dict[str, Any]:
        return _weigh(side.load_model(dtype=section.dtype, device="cpu", attention=section.attention))

    known = _remembered(config, config.text_model, "text", section.dtype, weigh)
    space = VectorSpace(
        model=config.text_model,
        dimensions=side.dimensions,
        contract=side.contract.as_dict(),
        digest=side.digest(known["weights"], section.dtype),
    )
    return space, network_of(side.facts.config.get_text_config(), known["parameters"])


def _image_tower(config: Config, facts: DualEncoderFacts) -> ImageTower:
    return ImageTower(facts, dtype=config.encode.dtype, device="cpu", attention=config.encode.attention)


def _weigh(model: Any) -> dict[str, Any]:
    return {
        "weights": model.weights_digest(),
        "parameters": sum(weight.numel() for weight in model.model.parameters()),
    }


def _remembered(
    config: Config, model: str, part: str, dtype: str, make: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    folder = FeatureStore(config.store.path, config.store.local_path).folder
    version = importlib.metadata.version("transformers")
    name = f"models/{checkpoint_name(resolve_model(model))}-{part}-{dtype}-transformers-{version}.json"
    if not folder.exists(name):
        folder.write_json(name, {**make(), "model": model})
    return dict(folder.read_json(name))


def _record_size(dimensions: int) -> RecordSize:
    """Of what `FrameVectors` stores, measured on an image."""
    geometry = Geometry(grid=(1, 1, 1), merge_size=1, feature_length=1, original_size=(1, 1), resized_size=(1, 1))
    vectors = np.zeros((1, dimensions), np.float32)
    data = encode_record(FrameVectors(slot="image", vectors=vectors, geometry=geometry).record({}))
    return RecordSize(row_bytes=vectors.nbytes, other_bytes=len(data) - vectors.nbytes)
