"""Dual encoders (CLIP, SigLIP, SigLIP 2 with NaFlex): texts and images to vectors of one space, a tower at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import CLIPModel, Siglip2Model, SiglipModel

from pipeline.errors import ConfigError
from pipeline.features.identity import canonical_json
from pipeline.models.checkpoint import load_config, load_tokenizer, load_whole, tokenizer_digest, weights_digest
from pipeline.models.image_sizing import (
    Images,
    ImageSizing,
    load_image_processor,
    network_inputs,
    read_sizing,
    shown_images,
)
from pipeline.models.location import resolve_model
from pipeline.models.padding import pad_mask, pad_rows
from pipeline.models.vision_language import resolve_device
from pipeline.planning.image_size import ImageGeometry, ImageRule, MaxPatches
from pipeline.pooling.contract import Normalisation, Output, Padding, PoolingContract, Truncation
from pipeline.pooling.pool import finish

Tower = Literal["text", "image"]
FAMILIES: dict[str, Any] = {"clip": CLIPModel, "siglip": SiglipModel, "siglip2": Siglip2Model}
_PARTS: dict[Tower, tuple[str, ...]] = {
    "text": ("text_model", "text_projection"),
    "image": ("vision_model", "visual_projection"),
}


@dataclass(frozen=True, kw_only=True)
class DualEncoderFacts:
    """Tokenizer, image processor, configuration and contracts of a dual encoder; loads no weights.

    Images are sized by `sizing` to what `image_geometry` says.
    """

    model: str
    path: str
    config: Any
    tokenizer: Any
    image_processor: Any
    text_contract: PoolingContract
    image_contract: PoolingContract
    sizing: ImageSizing

    @classmethod
    def load(cls, model: str, pooling: Mapping[str, Any] | None = None) -> DualEncoderFacts:
        """`pooling` replaces `normalisation` and `output` of both towers' contracts.

        Raises `ConfigError` for what cannot be read, families other than CLIP, SigLIP and SigLIP 2, and an image
        processor that makes another size than the tower takes.
        """
        path, where = resolve_model(model), f"model {model!r}"
        given = dict(pooling or {})
        if given.keys() - {"normalisation", "output"}:
            raise ConfigError(
                f"{where}: a dual encoder pools in its own way; only normalisation and output can be given"
            )
        config = load_config(model, path)
        if config.model_type not in FAMILIES:
            raise ConfigError(f"{where}: {config.model_type!r} is none of the families {', '.join(FAMILIES)}")
        tokenizer = load_tokenizer(model, path)
        image_processor = load_image_processor(where, path)
        facts = cls(
            model=model,
            path=path,
            config=config,
            tokenizer=tokenizer,
            image_processor=image_processor,
            text_contract=_text_contract(config, tokenizer).with_given(given),
            image_contract=_contract(None, None).with_given(given),
            sizing=read_sizing(where, image_processor),
        )
        facts._check(where)
        return facts

    def _check(self, where: str) -> None:
        kept = self.text_contract.output.dimensions
        if kept is not None and kept > self.vector_size:
            raise ConfigError(f"{where}: output.dimensions is {kept}, its vectors have {self.vector_size}")
        if self.text_contract.output.shape != "vector":
            raise ConfigError(
                f"{where}: a dual encoder makes one vector an item, not {self.text_contract.output.shape}"
            )
        side = getattr(self.config.vision_config, "image_size", None)
        made = self.image_geometry(480, 640).cropped_size
        resize = self.sizing.resize
        if not isinstance(resize, MaxPatches) and made != (side, side):
            raise ConfigError(f"{where}: its processor makes images of {made}, its tower takes {side} x {side}")
        patch = self.config.vision_config.patch_size
        if isinstance(resize, MaxPatches) and resize.patch_size != patch:
            raise ConfigError(f"{where}: its processor cuts patches of {resize.patch_size}, its tower of {patch}")
        if getattr(self.config.vision_config, "vision_use_head", True) is False:
            raise ConfigError(f"{where}: its vision tower has no head that pools")

    @property
    def vector_size(self) -> int:
        """Dimensions of a vector before any are cut."""
        text = self.config.text_config
        if self.config.model_type == "clip":
            return int(self.config.projection_dim)
        return int(getattr(text, "projection_size", None) or text.hidden_size)

    @property
    def dimensions(self) -> int:
        """Dimensions of a vector as it comes out."""
        return self.text_contract.output.dimensions or self.vector_size

    def image_geometry(self, height: int, width: int) -> ImageGeometry:
        """What an image of `height` x `width` pixels is resized and cropped to, and its patches."""
        return self.image_rule.geometry(height, width)

    @property
    def image_rule(self) -> ImageRule:
        """How images are sized."""
        return self.sizing.rule(self.config.vision_config.patch_size)

    @cached_property
    def text_digest(self) -> str:
        """16 hex digits over all that text vectors depend on besides texts, weights and precision."""
        terms = [self.text_contract.as_dict(), tokenizer_digest(self.tokenizer)]
        return hashlib.sha256(canonical_json(terms)).hexdigest()[:16]

    @cached_property
    def image_digest(self) -> str:
        """16 hex digits over all that image vectors depend on besides decoded pixels, weights and precision."""
        processor = [type(self.image_processor).__name__, self.image_processor.to_json_string()]
        return hashlib.sha256(canonical_json([self.image_contract.as_dict(), processor])).hexdigest()[:16]

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text with its special tokens, truncated as `text_contract` says; not padded."""
        if not texts:
            return []
        limit = self.text_contract.for_texts()[0].max_tokens
        ids: list[list[int]] = self.tokenizer(list(texts), truncation=True, max_length=limit)["input_ids"]
        return ids


def _contract(truncation: Truncation | None, padding: Padding | None) -> PoolingContract:
    return PoolingContract(
        method="model",
        normalisation=Normalisation(kind="l2", when="after"),
        truncation=truncation,
        padding=padding,
        output=Output(shape="vector"),
    )


def _text_contract(config: Any, tokenizer: Any) -> PoolingContract:
    """SigLIP was trained on texts padded to its full length, and pools at the last position, whatever stands there."""
    limit = min(tokenizer.model_max_length, config.text_config.max_position_embeddings)
    fixed = config.model_type != "clip"
    masked = "attention_mask" in tokenizer.model_input_names and tokenizer.padding_side == "left"
    padding = Padding(
        side=tokenizer.padding_side, to="max_tokens" if fixed else "longest", excluded=masked or not fixed
    )
    return _contract(Truncation(side=tokenizer.truncation_side, max_tokens=limit), padding)


def _load_tower(facts: DualEncoderFacts, tower: Tower, **options: Any) -> Any:
    """The model with one tower: the other's modules are gone before any weight is read, as in `halves.py`."""
    whole = FAMILIES[facts.config.model_type]
    others = [name for side, names in _PARTS.items() if side != tower for name in names]

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, config, *args, **kwargs)
        for name in others:
            if hasattr(self, name):
                delattr(self, name)
        self._keys_to_ignore_on_load_unexpected = {".*"}
        self._is_hf_initialized = True  # CLIP would draw random numbers for both projections

    tower_class = type(whole.__name__, (whole,), {"__init__": __init__, "__module__": whole.__module__})
    return load_whole(tower_class, facts.path, facts.config, **options)


class TextTower:
    """The text tower of a dual encoder on one device."""

    def __init__(self, facts: DualEncoderFacts, *, dtype: str, device: str, attention: str | None = None) -> None:
        self.facts = facts
        self.device = torch.device(resolve_device(device))
        self.model = _load_tower(facts, "text", dtype=dtype, device=str(self.device), attention=attention)

    def weights_digest(self) -> str:
        """Digest over the tower's and its projection's weights, at the loaded precision."""
        return weights_digest(self.model)

    @torch.inference_mode()
    def embed_texts(self, token_ids: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """float32 vectors (B, D) of B tokenized texts, in order."""
        contract, tokenizer = self.facts.text_contract, self.facts.tokenizer
        truncation, padding = contract.for_texts()
        side = padding.side
        length = truncation.max_tokens if padding.to == "max_tokens" else 0
        inputs = {"input_ids": pad_rows(token_ids, side=side, value=tokenizer.pad_token_id or 0, length=length)}
        if "attention_mask" in tokenizer.model_input_names:
            inputs["attention_mask"] = pad_mask(token_ids, side=side, length=length)
        output = self.model.get_text_features(**{name: tensor.to(self.device) for name, tensor in inputs.items()})
        return np.asarray(finish(output.pooler_output.float(), contract).cpu().numpy())


class ImageTower:
    """The image tower of a dual encoder on one device."""

    def __init__(self, facts: DualEncoderFacts, *, dtype: str, device: str, attention: str | None = None) -> None:
        self.facts = facts
        self.device = torch.device(resolve_device(device))
        self.model = _load_tower(facts, "image", dtype=dtype, device=str(self.device), attention=attention)

    def weights_digest(self) -> str:
        """Digest over the tower's and its projection's weights, at the loaded precision."""
        return weights_digest(self.model)

    def embed_images(self, images: Images) -> npt.NDArray[np.float32]:
        """float32 vectors (B, D) of B uint8 images (H, W, 3), or of one array (B, H, W, 3), in order.

        Each image has its `resized_size`, or has been cropped to its `cropped_size` already. Sizes may differ. Raises
        `ValueError` for an image that has neither.
        """
        shown = shown_images(self.facts.sizing, images)
        return np.asarray(self.compute([image.to(self.device) for image in shown]).cpu().numpy())

    @torch.inference_mode()
    def compute(self, shown: Sequence[torch.Tensor]) -> torch.Tensor:
        """float32 vectors (B, D) of B images as the tower is shown them, uint8 (H, W, 3); all on its device."""
        inputs = network_inputs(self.facts.image_processor, self.facts.sizing, shown)
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        output = self.model.get_image_features(**inputs)
        return finish(output.pooler_output.float(), self.facts.image_contract)
