"""The tower and projector of a checkpoint: frames in, feature records out."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipeline.features.codec import Container, FeatureRecord, TensorView
from pipeline.models.checkpoint import weights_digest
from pipeline.models.halves import load_half
from pipeline.models.location import resolve_model
from pipeline.models.processing import process_item
from pipeline.models.vision_language import VisionLanguageFacts, resolve_device
from pipeline.schema import Frames, Geometry, Modality, Placeholder


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedItem:
    """What the tower made of one item.

    `tensors` by name, all of one `container` kind; `inputs` are what the language model is told of the item besides;
    `geometry` has the times shown.
    """

    slot: Modality
    container: Container
    tensors: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]
    geometry: Geometry
    placeholder: Placeholder

    def record(self, key_terms: dict[str, Any]) -> FeatureRecord:
        """The storable form."""
        return FeatureRecord(
            key_terms=key_terms,
            tensors={name: _tensor_view(tensor) for name, tensor in self.tensors.items()},
            inputs={name: _tensor_view(tensor) for name, tensor in self.inputs.items()},
            slot=self.slot,
            container=self.container,
            unit="item" if self.container == "tuple" else "tile",
            geometry=self.geometry,
            placeholder=self.placeholder,
        )

    def mismatch(self, planned: Geometry) -> str:
        """How the item differs from its plan: in features, placeholders or patches; "" where it does not."""
        features = self.tensors["pooler_output"]
        found = {"features": features.shape[:-1].numel(), "placeholders": self.placeholder.num_tokens}
        for name, number in found.items():
            if number != planned.feature_length:
                return f"the model made {number} {name} where {planned.feature_length} were planned"
        grid = self.inputs.get(f"{self.slot}_grid_thw")
        if grid is not None and tuple(grid[0].tolist()) != planned.grid:
            return f"the model's processor made a grid of {grid[0].tolist()} where {list(planned.grid)} was planned"
        return ""


class VisionEncoder:
    """Tower and projector on one device."""

    def __init__(self, facts: VisionLanguageFacts, *, dtype: str, device: str, attention: str | None = None) -> None:
        self.facts = facts
        self.device = torch.device(resolve_device(device))
        path = resolve_model(facts.model)
        self.model: Any = load_half(path, "encoder", dtype=dtype, device=str(self.device), attention=attention)

    def weights_digest(self) -> str:
        """Digest over names, types, shapes and bytes of tower and projector, at the loaded precision."""
        return weights_digest(self.model)

    @torch.inference_mode()
    def encode(
        self, modality: Modality, items: Sequence[Frames], geometries: Sequence[Geometry], seconds: dict[str, float]
    ) -> list[EncodedItem]:
        """Features of planned frames of one modality, in order; adds `mm_processor` and `vision_encode` seconds.

        Frames that were planned by rule have their final size and go through the tower together; others are prepared
        and encoded one by one. Whether an item came out as planned is for the caller to ask (`EncodedItem.mismatch`).
        Raises `torch.OutOfMemoryError` as it comes.
        """
        if modality in self.facts.rules:
            return self._encode_together(modality, items, geometries, seconds)
        pairs = zip(items, geometries, strict=True)
        return [self._encode_alone(modality, frames, geometry, seconds) for frames, geometry in pairs]

    def _encode_together(
        self, modality: Modality, items: Sequence[Frames], geometries: Sequence[Geometry], seconds: dict[str, float]
    ) -> list[EncodedItem]:
        started = time.perf_counter()
        processor = getattr(self.facts.processor, f"{modality}_processor")
        options: dict[str, Any] = {"do_resize": False, "input_data_format": "channels_first", "return_tensors": "pt"}
        tensors = [self._on_device(frames) for frames in items]
        if modality == "image":
            inputs = processor(images=[tensor[0] for tensor in tensors], **options).to(self.device)
        else:
            inputs = processor(videos=tensors, do_sample_frames=False, **options).to(self.device)
        processed = time.perf_counter()
        output = self._features(modality, dict(inputs))
        per_item: list[dict[str, torch.Tensor]] = [{} for _ in items]
        for name, pieces in _feature_fields(output):
            for tensors_of_item, piece in zip(per_item, pieces, strict=True):
                # A copy of its own: a view would keep the whole batch alive and be stored whole.
                tensors_of_item[name] = piece.detach().to("cpu", copy=True).contiguous()
        _add_seconds(seconds, started, processed)
        grids = inputs[f"{modality}_grid_thw"].cpu()
        encoded = []
        for frames, planned, grid, features in zip(items, geometries, grids, per_item, strict=True):
            geometry = replace(planned, timestamps=frames.pts_seconds if modality == "video" else ())
            encoded.append(
                EncodedItem(
                    slot=modality,
                    container="tuple",
                    tensors=features,
                    inputs={f"{modality}_grid_thw": grid[None]},
                    geometry=geometry,
                    placeholder=self.facts.placeholder(modality, geometry),
                )
            )
        return encoded

    def _encode_alone(
        self, modality: Modality, frames: Frames, planned: Geometry, seconds: dict[str, float]
    ) -> EncodedItem:
        started = time.perf_counter()
        pixels = torch.from_numpy(frames.pixels).permute(0, 3, 1, 2).contiguous()
        item = process_item(
            self.facts.processor,
            self.facts.media_tokens,
            modality,
            pixels,
            frames.pts_seconds,
            planned.duration_seconds,
        )
        processed = time.perf_counter()
        tensors = {name: tensor.to(self.device) for name, tensor in (item.pixels | item.inputs).items()}
        container, features = _one_item(self._features(item.slot, tensors))
        _add_seconds(seconds, started, processed)
        return EncodedItem(
            slot=item.slot,
            container=container,
            tensors=features,
            inputs=item.inputs,
            geometry=replace(planned, timestamps=frames.pts_seconds if modality == "video" else ()),
            placeholder=item.placeholder,
        )

    def _features(self, slot: Modality, inputs: dict[str, torch.Tensor]) -> Any:
        function = getattr(self.model, f"get_{slot}_features")
        accepted = inspect.signature(function).parameters
        return function(**{name: tensor for name, tensor in inputs.items() if name in accepted}, return_dict=True)

    def _on_device(self, frames: Frames) -> torch.Tensor:
        tensor = torch.from_numpy(frames.pixels).permute(0, 3, 1, 2).contiguous()  # (T, C, H, W)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


def _add_seconds(seconds: dict[str, float], started: float, processed: float) -> None:
    seconds["mm_processor"] = seconds.get("mm_processor", 0.0) + processed - started
    seconds["vision_encode"] = seconds.get("vision_encode", 0.0) + time.perf_counter() - processed


def _feature_fields(output: Any) -> list[tuple[str, Any]]:
    """Projected features and deep-stack levels by name: all that the language model is handed."""
    fields: list[tuple[str, Any]] = [("pooler_output", output.pooler_output)]
    for level, features in enumerate(getattr(output, "deepstack_features", None) or ()):
        fields.append((f"deepstack_features.{level}", features))
    return fields


def _one_item(output: Any) -> tuple[Container, dict[str, torch.Tensor]]:
    """The container kind and the tensors of an output that holds one item."""
    tensors = {}
    container: Container = "tensor"
    for name, value in _feature_fields(output):
        if isinstance(value, list | tuple):
            container = "tuple"
            [value] = value
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
    return container, tensors


def _tensor_view(tensor: torch.Tensor) -> TensorView:
    tensor = tensor.cpu().contiguous()
    raw = tensor.reshape(-1).view(torch.uint8).numpy()
    return TensorView(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), data=raw.data)
