"""What makes vectors, behind one face: the texts' side and the images' side of a checkpoint.

A dual encoder has both; a sentence-transformers folder, or any encoder with its contract given, has the texts' side.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pipeline.features.codec import FeatureRecord, TensorView
from pipeline.features.identity import canonical_json
from pipeline.models.checkpoint import load_config
from pipeline.models.dual_encoder import FAMILIES, DualEncoderFacts, ImageTower, TextTower
from pipeline.models.image_classifier import ImageClassifier
from pipeline.models.location import resolve_model
from pipeline.models.text import TextEmbedder, TextFacts
from pipeline.pooling.contract import PoolingContract
from pipeline.schema import Frames, Geometry, Modality, Placeholder

_NO_PLACEHOLDER = Placeholder(text="", runs=())


def is_dual_encoder(model: str) -> bool:
    """Whether the checkpoint has a tower for images beside the one for texts. Raises `ConfigError` as `load_config`."""
    return load_config(model, resolve_model(model)).model_type in FAMILIES


@dataclass(frozen=True, kw_only=True)
class TextSide:
    """Tokenizer, contract and identity of what embeds texts; loads no weights.

    `prompt_name` is the one of the folder's prompts that stands before each text.
    """

    facts: TextFacts | DualEncoderFacts
    prompt_name: str | None

    @classmethod
    def load(cls, model: str, pooling: Mapping[str, Any], prompt_name: str | None) -> TextSide:
        """Raises `ConfigError` for what cannot be read, is not supported, and for a prompt that there is not."""
        if is_dual_encoder(model):
            return cls(facts=DualEncoderFacts.load(model, pooling), prompt_name=None)
        facts = TextFacts.load(model, pooling)
        facts.prompts.text(prompt_name)
        return cls(facts=facts, prompt_name=prompt_name)

    @property
    def contract(self) -> PoolingContract:
        """Of the texts' vectors."""
        return self.facts.contract if isinstance(self.facts, TextFacts) else self.facts.text_contract

    @property
    def dimensions(self) -> int:
        """Of a vector as it comes out."""
        return self.facts.dimensions

    @property
    def tokenizer(self) -> Any:
        """The fast tokenizer, set to the contract's truncation."""
        return self.facts.tokenizer

    @property
    def max_tokens(self) -> int:
        """Of a text, prompt and special tokens included."""
        return self.contract.for_texts()[0].max_tokens

    @property
    def prompt(self) -> str:
        """What stands before each text."""
        return self.facts.prompts.text(self.prompt_name) if isinstance(self.facts, TextFacts) else ""

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, as it is embedded."""
        if isinstance(self.facts, TextFacts):
            return self.facts.tokenize(texts, self.prompt_name)
        return self.facts.tokenize(texts)

    def load_model(self, *, dtype: str, device: str, attention: str | None) -> TextTower | TextEmbedder:
        """The weights, on a device."""
        kind: Any = TextEmbedder if isinstance(self.facts, TextFacts) else TextTower
        return kind(self.facts, dtype=dtype, device=device, attention=attention)  # type: ignore[no-any-return]

    def digest(self, weights: str, dtype: str) -> str:
        """16 hex digits over all that a text's vector depends on besides the text."""
        processing = self.facts.processing_digest if isinstance(self.facts, TextFacts) else self.facts.text_digest
        terms = [processing, weights, dtype, self.prompt_name]
        return hashlib.sha256(canonical_json(terms)).hexdigest()[:16]


def embed_texts(
    model: TextTower | TextEmbedder, token_ids: Sequence[Sequence[int]], prompt_name: str | None
) -> npt.NDArray[np.float32]:
    """float32 vectors (B, D) of B texts that `TextSide.tokenize` cut, in order."""
    if isinstance(model, TextEmbedder):
        return model.embed(token_ids, prompt_name)
    return model.embed_texts(token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameVectors:
    """One item's vectors, or logits, (T, D): of an image one, of a video one a frame."""

    slot: Modality
    vectors: npt.NDArray[np.float32]
    geometry: Geometry

    def record(self, key_terms: dict[str, Any]) -> FeatureRecord:
        """The storable form."""
        return FeatureRecord(
            key_terms=key_terms,
            tensors={"pooler_output": TensorView.of(self.vectors)},
            container="tensor",
            unit="frame",
            slot=self.slot,
            geometry=self.geometry,
            placeholder=_NO_PLACEHOLDER,
        )

    def mismatch(self, planned: Geometry) -> str:
        """How the item differs from its plan; "" where it does not."""
        if len(self.vectors) != planned.feature_length:
            return f"the model made {len(self.vectors)} vectors where {planned.feature_length} were planned"
        return ""


class FrameEncoder:
    """A network that looks at each frame by itself, on the frames of planned items.

    Of an image tower it stores vectors, of an image classifier logits.
    """

    def __init__(self, network: ImageTower | ImageClassifier) -> None:
        self.device = network.device
        self.compute = network.logits if isinstance(network, ImageClassifier) else network.embed_images

    def encode(
        self, modality: Modality, items: Sequence[Frames], geometries: Sequence[Geometry], seconds: dict[str, float]
    ) -> list[FrameVectors]:
        """Vectors of planned frames, in order; adds `vision_encode` seconds, the processor's part included.

        Raises `torch.OutOfMemoryError` as it comes.
        """
        started = time.perf_counter()
        frames = np.concatenate([item.pixels for item in items])  # (frames of all items, H, W, 3)
        vectors = self.compute(frames)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds["vision_encode"] = seconds.get("vision_encode", 0.0) + time.perf_counter() - started
        ends = np.cumsum([len(item.pixels) for item in items])
        return [
            FrameVectors(
                slot=modality,
                vectors=np.ascontiguousarray(vectors[end - len(item.pixels) : end]),
                geometry=replace(planned, timestamps=item.pts_seconds if modality == "video" else ()),
            )
            for end, item, planned in zip(ends, items, geometries, strict=True)
        ]
