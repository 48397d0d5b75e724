"""What makes vectors, behind one face: the texts' side and the images' side of a checkpoint.

A dual encoder has both; a sentence-transformers folder, or any encoder with its contract given, has the texts' side.
"""

from __future__ import annotations

import hashlib
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
from pipeline.models.transfer import DeviceLink, Fetched, Mark
from pipeline.models.vision_encoder import StagedMedia
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

    def record(self, key_terms: dict[str, Any], made_seconds: float = 0.0) -> FeatureRecord:
        """The storable form."""
        return FeatureRecord(
            key_terms=key_terms,
            made_seconds=made_seconds,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorBatch:
    """Items whose vectors are still on their way to the host."""

    staged: StagedMedia
    fetched: Fetched
    started: Mark
    computed: Mark

    def wait(self, seconds: dict[str, float]) -> list[FrameVectors]:
        """The items, when they can be read; any thread may ask. Adds `vision_encode` seconds, with the processor's."""
        self.fetched.wait()
        taken = self.started.seconds_until(self.computed)
        seconds["vision_encode"] = seconds.get("vision_encode", 0.0) + taken
        [vectors] = self.fetched.tensors
        items = self.staged.items
        found = torch.split_with_sizes(vectors, [len(item.pixels) for item in items])
        return [
            FrameVectors(
                slot=self.staged.modality,
                vectors=np.asarray(each.numpy()),
                geometry=replace(planned, timestamps=item.pts_seconds if self.staged.modality == "video" else ()),
            )
            for each, item, planned in zip(found, items, self.staged.geometries, strict=True)
        ]


class FrameEncoder:
    """A network that looks at each frame by itself, on the frames of planned items.

    Of an image tower it stores vectors, of an image classifier logits.
    """

    def __init__(self, network: ImageTower | ImageClassifier) -> None:
        self.network = network
        self.link = DeviceLink(network.device)

    def stage(self, modality: Modality, items: Sequence[Frames], geometries: Sequence[Geometry]) -> StagedMedia:
        """What can be done for a batch while the one before is computed, in another thread. Shapes may differ."""
        sent = self.link.send_frames(items)
        return StagedMedia(modality=modality, items=items, geometries=geometries, frames=sent)

    def compute(self, staged: StagedMedia) -> VectorBatch:
        """Vectors of what was staged, for which the host does not wait.

        Raises `torch.OutOfMemoryError` as it comes.
        """
        assert staged.frames is not None
        started = self.link.mark()
        frames = [frame for item in self.link.receive(staged.frames) for frame in item]
        vectors = self.network.compute(frames)
        computed = self.link.mark()
        return VectorBatch(staged=staged, fetched=self.link.fetch([vectors]), started=started, computed=computed)
