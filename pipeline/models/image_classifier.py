"""Image classifiers (ViT, ConvNeXt, ResNet, SigLIP and other heads over an image network): images to logits."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForImageClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING

from pipeline.errors import ConfigError
from pipeline.features.identity import canonical_json
from pipeline.models.activation import NAMED, pipeline_activation
from pipeline.models.checkpoint import load_config, load_whole, weights_digest
from pipeline.models.image_sizing import (
    Images,
    ImageSizing,
    check_sizing,
    load_image_processor,
    network_inputs,
    read_sizing,
    shown_images,
)
from pipeline.models.location import resolve_model
from pipeline.models.vision_language import resolve_device
from pipeline.planning.image_size import ImageRule, MaxPatches, ShortestEdge
from pipeline.pooling.contract import Normalisation, Output, PoolingContract

# Pixels a side of what counts as a patch. What a configuration calls `patch_size` is another thing in each family
# (MobileViT's are 2 x 2 of a feature map), and most convolutional networks have none.
_COUNTED_PATCH = 16
_TRIED_SIZES = ((48, 80), (90, 33))  # (height, width)

CONTRACT = PoolingContract(
    method="model",
    normalisation=Normalisation(kind="none"),
    truncation=None,
    padding=None,
    output=Output(shape="scores"),
)


@dataclass(frozen=True, kw_only=True)
class ImageClassifierFacts:
    """Image processor and configuration of an image classifier; loads no weights.

    Images are sized by `sizing`. `labels` are the names of a logit's columns.
    """

    model: str
    path: str
    config: Any
    image_processor: Any
    sizing: ImageSizing
    labels: tuple[str, ...]

    @classmethod
    def load(cls, model: str) -> ImageClassifierFacts:
        """Raises `ConfigError` for what cannot be read, is no image classifier, names no labels, and for an image
        processor whose arithmetic is not reproduced.
        """
        path, where = resolve_model(model), f"model {model!r}"
        config = load_config(model, path)
        _check_network(where, config)
        processor = load_image_processor(where, path)
        sizing = read_sizing(where, processor)
        if isinstance(sizing.resize, ShortestEdge) and sizing.crop is None:
            raise ConfigError(f"{where}: its image processor leaves images of any length ({sizing}), without a crop")
        check_sizing(where, processor, sizing)
        if not config.id2label:
            raise ConfigError(f"{where}: its configuration names no labels (id2label)")
        return cls(
            model=model,
            path=path,
            config=config,
            image_processor=processor,
            sizing=sizing,
            labels=tuple(config.id2label[column] for column in range(config.num_labels)),
        )

    def activation(self, given: str) -> str:
        """The dotted name of what makes scores of its logits: none, sigmoid, softmax, or auto, as transformers does."""
        return pipeline_activation(self.config) if given == "auto" else NAMED[given]

    @property
    def image_rule(self) -> ImageRule:
        """How images are sized, and counted in patches: NaFlex's own, or squares of 16 x 16 pixels."""
        resize = self.sizing.resize
        return self.sizing.rule(resize.patch_size if isinstance(resize, MaxPatches) else _COUNTED_PATCH)

    @cached_property
    def processor_digest(self) -> str:
        """16 hex digits over all that logits depend on besides decoded pixels, weights and precision."""
        terms = ["logits", type(self.image_processor).__name__, self.image_processor.to_json_string()]
        return hashlib.sha256(canonical_json(terms)).hexdigest()[:16]


def _check_network(where: str, config: Any) -> None:
    mapping: Any = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    if type(config) not in mapping:
        raise ConfigError(f"{where}: {config.model_type!r} is no architecture of an image classifier")
    known = mapping[type(config)]
    network = known[0] if isinstance(known, tuple) else known
    parameters = inspect.signature(network.forward).parameters
    if "pixel_values" not in parameters or "input_ids" in parameters:
        raise ConfigError(f"{where}: {network.__name__} does not classify by an image's pixels alone")


class ImageClassifier:
    """An image classifier on one device."""

    def __init__(self, facts: ImageClassifierFacts, *, dtype: str, device: str, attention: str | None = None) -> None:
        self.facts = facts
        self.device = torch.device(resolve_device(device))
        self.model: Any = load_whole(
            AutoModelForImageClassification,
            facts.path,
            facts.config,
            dtype=dtype,
            device=str(self.device),
            attention=attention,
        )

    def weights_digest(self) -> str:
        """Digest over all weights, at the loaded precision."""
        return weights_digest(self.model)

    def logits(self, images: Images) -> npt.NDArray[np.float32]:
        """float32 logits (B, labels) of B uint8 images (H, W, 3), or of one array (B, H, W, 3), in order.

        Images are sized already. Raises `ValueError` for one that is not.
        """
        shown = shown_images(self.facts.sizing, images)
        return np.asarray(self.compute([image.to(self.device) for image in shown]).cpu().numpy())

    def compute(self, shown: Sequence[torch.Tensor]) -> torch.Tensor:
        """float32 logits (B, labels) of B images as the network is shown them, uint8 (H, W, 3); all on its device."""
        return self._forward(network_inputs(self.facts.image_processor, self.facts.sizing, shown))

    def check(self) -> None:
        """Raise `ConfigError` where logits of sized images in a batch are not those of the processor's own alone."""
        rng = np.random.default_rng(5)
        images = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in _TRIED_SIZES]
        where = f"model {self.facts.model!r}"
        try:
            inputs = [self.facts.image_processor(images=[i], return_tensors="pt") for i in images]
            theirs = [self._forward(each).cpu().numpy() for each in inputs]
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"{where} does not take what its own image processor makes: {error}") from error
        ours, expected = self.logits([self.facts.sizing.apply(image) for image in images]), np.concatenate(theirs)
        labels = (len(images), len(self.facts.labels))
        if expected.shape != labels:
            raise ConfigError(f"{where} gives logits of shape {expected.shape}, where its labels make {labels}")
        if not np.isfinite(expected).all():
            raise ConfigError(f"{where} gives logits of noise that are not finite, in {self.model.dtype}")
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 5e-2  # half precision rounds by batch
        gap, largest = float(np.abs(ours - expected).max()), float(np.abs(expected).max())
        if gap > tolerance * max(1.0, largest):
            raise ConfigError(f"{where} gives other logits of an image in a batch than alone, by up to {gap:.1e}")

    @torch.inference_mode()
    def _forward(self, inputs: Any) -> torch.Tensor:
        inputs = inputs.to(self.device)
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        logits: torch.Tensor = self.model(**inputs).logits.float()
        return logits
