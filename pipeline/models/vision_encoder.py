"""The tower and projector of a checkpoint: frames in, feature records out."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from pipeline.features.codec import Container, FeatureRecord, TensorView
from pipeline.models.checkpoint import weights_digest
from pipeline.models.features import one_item, split_inputs, split_items
from pipeline.models.halves import load_half
from pipeline.models.location import resolve_model
from pipeline.models.patch_embedding import multiply_patches
from pipeline.models.processing import ProcessedItems, normalise, process_item, process_items
from pipeline.models.transfer import DeviceLink, Fetched, Mark, Sent, channels_first, frames_tensor
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

    def record(self, key_terms: dict[str, Any], made_seconds: float = 0.0) -> FeatureRecord:
        """The storable form."""
        return FeatureRecord(
            key_terms=key_terms,
            made_seconds=made_seconds,
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


# Which items of a modality go through processor and tower together: any, or those of one shape.
Together = Literal["any", "one_shape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Items that were prepared on the host together; `pixels` names the tensors that were sent before `inputs`."""

    frames: Sequence[Frames]
    geometries: Sequence[Geometry]
    processed: ProcessedItems
    sent: Sent


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedMedia:
    """A batch on its way to the device: frames as they are, or groups of what the processor made of them."""

    modality: Modality
    items: Sequence[Frames]
    geometries: Sequence[Geometry]
    frames: Sent | None = None
    groups: Sequence[_Group] = ()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPart:
    """Items whose features are still on their way to the host, and when each step of them began."""

    items: list[EncodedItem]
    fetched: Fetched
    started: Mark
    processed: Mark
    computed: Mark


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedBatch:
    """A batch whose features are still on their way to the host. `prepare_seconds` is what staging took of the host."""

    parts: list[EncodedPart]
    prepare_seconds: float = 0.0

    def wait(self, seconds: dict[str, float]) -> list[EncodedItem]:
        """The items, when they can be read; any thread may ask. Adds `mm_processor` and `vision_encode` seconds."""
        processing, encoding = self.prepare_seconds, 0.0
        for part in self.parts:
            part.fetched.wait()
            processing += part.started.seconds_until(part.processed)
            encoding += part.processed.seconds_until(part.computed)
        seconds["mm_processor"] = seconds.get("mm_processor", 0.0) + processing
        seconds["vision_encode"] = seconds.get("vision_encode", 0.0) + encoding
        return [item for part in self.parts for item in part.items]


class VisionEncoder:
    """Tower and projector on one device.

    Items whose frames were planned by rule have their final size and go through the tower together. Others are
    prepared by the model's own processor: together as `together` allows, which `pair_check.check_pairs` finds out, and
    one by one where it says nothing. Modalities in `raw` are resized and tiled on the host, and normalised on the
    device.
    """

    def __init__(self, facts: VisionLanguageFacts, *, dtype: str, device: str, attention: str | None = None) -> None:
        self.facts = facts
        self.device = torch.device(resolve_device(device))
        path = resolve_model(facts.model)
        self.model: Any = load_half(path, "encoder", dtype=dtype, device=str(self.device), attention=attention)
        multiply_patches(self.model)
        self.link = DeviceLink(self.device)
        self.together: dict[Modality, Together] = {}
        self.raw: set[Modality] = set()

    def weights_digest(self) -> str:
        """Digest over names, types, shapes and bytes of tower and projector, at the loaded precision."""
        return weights_digest(self.model)

    def encode(
        self, modality: Modality, items: Sequence[Frames], geometries: Sequence[Geometry], seconds: dict[str, float]
    ) -> list[EncodedItem]:
        """Features of planned frames of one modality, in order: `stage` and `compute`, waited for."""
        return self.compute(self.stage(modality, items, geometries)).wait(seconds)

    @torch.inference_mode()
    def stage(self, modality: Modality, items: Sequence[Frames], geometries: Sequence[Geometry]) -> StagedMedia:
        """What can be done for a batch while the one before is computed, in another thread."""
        staged = StagedMedia(modality=modality, items=items, geometries=geometries)
        if modality in self.facts.rules:
            return replace(staged, frames=self.link.send_frames(items))
        started = time.perf_counter()
        groups = []
        for run in _runs(items, self.together.get(modality)):
            groups.append(self._prepared(modality, items[run], geometries[run]))
        return replace(staged, groups=groups, seconds=time.perf_counter() - started)

    @torch.inference_mode()
    def compute(self, staged: StagedMedia) -> EncodedBatch:
        """Features of what was staged, for which the host does not wait.

        Whether an item came out as planned is for the caller to ask (`EncodedItem.mismatch`). Raises
        `torch.OutOfMemoryError` as it comes.
        """
        if staged.frames is not None:
            return EncodedBatch(parts=[self._compute_frames(staged, staged.frames)])
        parts = [self._compute_group(staged.modality, group) for group in staged.groups]
        return EncodedBatch(parts=parts, prepare_seconds=staged.seconds)

    def _compute_frames(self, staged: StagedMedia, frames: Sent) -> EncodedPart:
        started = self.link.mark()
        modality, geometries = staged.modality, staged.geometries
        processor = getattr(self.facts.processor, f"{modality}_processor")
        options: dict[str, Any] = {"do_resize": False, "input_data_format": "channels_first", "return_tensors": "pt"}
        tensors = [channels_first(each) for each in self.link.receive(frames)]
        if modality == "image":
            inputs = processor(images=[tensor[0] for tensor in tensors], **options)
        else:
            inputs = processor(videos=tensors, do_sample_frames=False, **options)
        grids = inputs[f"{modality}_grid_thw"].cpu()
        lengths = [int(grid.prod()) // planned.merge_size**2 for grid, planned in zip(grids, geometries, strict=True)]
        processed = self.link.mark()
        output = self._features(modality, dict(inputs.to(self.device)))
        container, features = split_items(output, lengths)
        computed = self.link.mark()
        features, fetched = self._fetch(features)
        placeholders: dict[Any, Placeholder] = {}
        encoded = []
        for item, planned, grid, of_item in zip(staged.items, geometries, grids, features, strict=True):
            geometry = replace(planned, timestamps=item.pts_seconds if modality == "video" else ())
            shown = (geometry.grid, geometry.timestamps)
            if shown not in placeholders:
                placeholders[shown] = self.facts.placeholder(modality, geometry)
            encoded.append(
                EncodedItem(
                    slot=modality,
                    container=container,
                    tensors=of_item,
                    inputs={f"{modality}_grid_thw": grid[None]},
                    geometry=geometry,
                    placeholder=placeholders[shown],
                )
            )
        return EncodedPart(items=encoded, fetched=fetched, started=started, processed=processed, computed=computed)

    def _prepared(self, modality: Modality, items: Sequence[Frames], geometries: Sequence[Geometry]) -> _Group:
        processor, tokens = self.facts.processor, self.facts.media_tokens
        frames = [channels_first(frames_tensor(item)) for item in items]
        times = [item.pts_seconds for item in items]
        durations = [planned.duration_seconds for planned in geometries]
        if modality not in self.together:
            one = process_item(processor, tokens, modality, frames[0], times[0], durations[0])
            processed = ProcessedItems(
                slot=one.slot, pixels=one.pixels, inputs=one.inputs, placeholders=(one.placeholder,)
            )
        else:
            raw = modality in self.raw
            processed = process_items(processor, tokens, modality, frames, times, durations, raw=raw)
        sent = self.link.send([*processed.pixels.values(), *processed.inputs.values()])
        return _Group(frames=items, geometries=geometries, processed=processed, sent=sent)

    def _compute_group(self, modality: Modality, group: _Group) -> EncodedPart:
        started = self.link.mark()
        processed, count = group.processed, len(group.frames)
        names = [*processed.pixels, *processed.inputs]
        tensors = dict(zip(names, self.link.receive(group.sent), strict=True))
        if modality in self.raw:
            processor = getattr(self.facts.processor, f"{modality}_processor")
            raw = {name for name in processed.pixels if tensors[name].dtype == torch.uint8}
            tensors |= {name: normalise(processor, tensors[name]) for name in raw}
        prepared = self.link.mark()
        output = self._features(processed.slot, tensors)
        if count == 1:
            container, one = one_item(output)
            features, inputs = [one], [processed.inputs]
        else:
            container, features = split_items(output, [each.num_tokens for each in processed.placeholders])
            inputs = split_inputs(processed.inputs, count)
        computed = self.link.mark()
        features, fetched = self._fetch(features)
        encoded = []
        for k, (item, planned) in enumerate(zip(group.frames, group.geometries, strict=True)):
            encoded.append(
                EncodedItem(
                    slot=processed.slot,
                    container=container,
                    tensors=features[k],
                    inputs=inputs[k],
                    geometry=replace(planned, timestamps=item.pts_seconds if modality == "video" else ()),
                    placeholder=processed.placeholders[k],
                )
            )
        return EncodedPart(items=encoded, fetched=fetched, started=started, processed=prepared, computed=computed)

    def _features(self, slot: Modality, inputs: dict[str, torch.Tensor]) -> Any:
        function = getattr(self.model, f"get_{slot}_features")
        accepted = inspect.signature(function).parameters
        return function(**{name: tensor for name, tensor in inputs.items() if name in accepted}, return_dict=True)

    def _fetch(self, features: Sequence[dict[str, torch.Tensor]]) -> tuple[list[dict[str, torch.Tensor]], Fetched]:
        fetched = self.link.fetch([tensor for of_item in features for tensor in of_item.values()])
        arriving = iter(fetched.tensors)
        return [{name: next(arriving) for name in of_item} for of_item in features], fetched


def _runs(items: Sequence[Frames], together: Together | None) -> list[slice]:
    """Neighbours that are prepared and encoded together."""
    if together == "any":
        return [slice(0, len(items))]
    if together is None:
        return [slice(k, k + 1) for k in range(len(items))]
    lengths = [len(list(run)) for _, run in itertools.groupby(items, key=lambda item: item.pixels.shape)]
    ends = list(itertools.accumulate(lengths))
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def _tensor_view(tensor: torch.Tensor) -> TensorView:
    tensor = tensor.cpu().contiguous()
    raw = tensor.reshape(-1).view(torch.uint8).numpy()
    return TensorView(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), data=raw.data)
