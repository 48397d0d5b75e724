"""A model's own processor run on one media item, real or blank, and its outputs sorted by what they are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.language.placeholder import collapse
from pipeline.schema import Modality, Placeholder

_TEXT_OUTPUTS = {"input_ids", "attention_mask", "text_replacement_offsets"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedItem:
    """One item as its processor prepares it.

    `slot` names the encoder that takes it ("image" or "video": some families show a video as images), `pixels` is what
    only the encoder needs, `inputs` the small tensors that describe the item (grids, sizes, seconds a grid step), which
    the language model may need as well. `token_types` is the name under which the processor marks media tokens, if any.
    """

    slot: Modality
    pixels: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]
    placeholder: Placeholder
    token_types: str | None


def process_item(
    processor: Any,
    media_tokens: Sequence[str],
    modality: Modality,
    frames: torch.Tensor,
    times: Sequence[float],
    duration_seconds: float,
) -> ProcessedItem:
    """Prepare `uint8` frames (T, C, H, W) shown at `times` (seconds); with meta tensors only the arithmetic is done.

    `media_tokens` are those that features are put in the place of.
    """
    outputs = dict(
        run_processor(processor, getattr(processor, f"{modality}_token"), modality, frames, times, duration_seconds)
    )
    [replaced] = outputs["text_replacement_offsets"][0]
    shape = outputs["input_ids"].shape
    rest = {name: value for name, value in outputs.items() if name not in _TEXT_OUTPUTS}
    types = [name for name, value in rest.items() if "type" in name and getattr(value, "shape", None) == shape]
    tensors = {name: torch.as_tensor(value) for name, value in rest.items() if name not in types}
    pixels = {name: tensor for name, tensor in tensors.items() if "pixel" in name}
    return ProcessedItem(
        slot="video" if any("video" in name for name in pixels) else "image",
        pixels=pixels,
        inputs={name: tensor for name, tensor in tensors.items() if name not in pixels},
        placeholder=collapse(replaced["replacement"], media_tokens),
        token_types=types[0] if types else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedItems:
    """Items of one modality as their processor prepares them together: as `ProcessedItem`, in tensors that hold all."""

    slot: Modality
    pixels: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]
    placeholders: tuple[Placeholder, ...]


def process_items(
    processor: Any,
    media_tokens: Sequence[str],
    modality: Modality,
    frames: Sequence[torch.Tensor],
    times: Sequence[Sequence[float]],
    durations_seconds: Sequence[float],
    *,
    raw: bool = False,
) -> ProcessedItems:
    """`process_item` of several items in one call of the processor. Raises what a processor raises that cannot.

    With `raw` pixels stay `uint8`, a quarter of the bytes, for `normalise` to finish elsewhere.
    """
    # Tensors of the media only: token ids are of no use here, and differ in length.
    options: dict[str, Any] = {"return_tensors": "pt"}
    if raw:
        options |= {"do_rescale": False, "do_normalize": False}
    media: dict[str, Any]
    if modality == "image":
        media = {"images": [[each[0]] for each in frames], "images_kwargs": options}  # a list for each text
    else:
        shown = zip(times, durations_seconds, strict=True)
        options |= {"video_metadata": [_metadata(*each) for each in shown], "do_sample_frames": False}
        media = {"videos": list(frames), "videos_kwargs": options}
    text = [getattr(processor, f"{modality}_token")] * len(frames)
    media["text_kwargs"] = {"return_tensors": None}
    outputs = dict(processor(text=text, return_text_replacement_offsets=True, **media))
    texts = [replaced["replacement"] for [replaced] in outputs["text_replacement_offsets"]]
    tensors = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
    pixels = {name: tensor for name, tensor in tensors.items() if "pixel" in name}
    return ProcessedItems(
        slot="video" if any("video" in name for name in pixels) else "image",
        pixels=pixels,
        inputs={name: tensor for name, tensor in tensors.items() if name not in pixels},
        placeholders=tuple(collapse(text, media_tokens) for text in texts),
    )


def normalise(processor: Any, pixels: torch.Tensor) -> torch.Tensor:
    """What an image or video processor does last, on the device of `pixels`: float32 of uint8 (..., C, H, W)."""
    mean, std = tuple(processor.image_mean or ()), tuple(processor.image_std or ())
    settings = (processor.do_rescale, processor.rescale_factor, processor.do_normalize, mean, std)
    normalised: torch.Tensor = processor.rescale_and_normalize(pixels, *settings)
    return normalised


def run_processor(
    processor: Any,
    text: str,
    modality: Modality,
    frames: torch.Tensor,
    times: Sequence[float],
    duration_seconds: float,
) -> Any:
    """The processor's outputs for `text`, which shows one item."""
    options: dict[str, Any] = {"return_tensors": "pt", "return_text_replacement_offsets": True}
    if modality == "image":
        return processor(text=[text], images=[frames[0]], **options)
    videos = {"video_metadata": [_metadata(times, duration_seconds)], "do_sample_frames": False}
    return processor(text=[text], videos=[frames], videos_kwargs=videos, **options)


def _metadata(times: Sequence[float], duration_seconds: float) -> dict[str, Any]:
    # Counted at one frame a second, indices are the true times, which some processors write into the prompt, and the
    # number of frames is the duration, from which some work out the seconds that a grid step takes.
    return {"total_num_frames": duration_seconds, "fps": 1.0, "frames_indices": list(times)}
