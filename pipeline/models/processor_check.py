"""Compares what headrace works out from sizes alone with the model's own processor, once, before anything is planned.

A family whose grids, placeholders or inputs differ would not fail later: it would answer wrongly and in silence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pipeline.errors import ConfigError
from pipeline.schema import Modality, Probe, SamplePlan

if TYPE_CHECKING:
    from pipeline.models.vision_language import VisionLanguageFacts

# Small, large, odd, upright, wide; two, three and many frames. (frames, height, width)
_SIZES: dict[Modality, tuple[tuple[int, int, int], ...]] = {
    "image": ((1, 61, 83), (1, 480, 640), (1, 1999, 1201), (1, 300, 2400)),
    "video": ((2, 61, 83), (3, 480, 640), (8, 721, 1283), (20, 1280, 720)),
}
_RATE_FPS = 2.0
_KNOWN_INPUTS = {
    "input_ids",
    "attention_mask",
    "mm_token_type_ids",
    "pixel_values",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
}


def check_processor(facts: VisionLanguageFacts) -> None:
    """Raise `ConfigError`, saying what differs, when the model's processor does not do what headrace plans with."""
    for modality in facts.rules:
        for num_frames, height, width in _SIZES[modality]:
            problem = _difference(facts, modality, num_frames, height, width)
            if problem is not None:
                raise ConfigError(
                    f"model {facts.model!r}: for a {modality} of {num_frames} x {height} x {width}, {problem}; "
                    "this version cannot run the family without changing its answers"
                )


def _difference(facts: VisionLanguageFacts, modality: Modality, num_frames: int, height: int, width: int) -> str | None:
    times = tuple(k / _RATE_FPS for k in range(num_frames))
    probe = Probe(modality=modality, container="", codec="", width=width, height=height, num_bytes=0)
    geometry = facts.geometry(probe, SamplePlan(pts_seconds=times), timestamps=times)
    inputs = _run_processor(facts.processor, modality, num_frames, height, width)
    unknown = sorted(set(inputs) - _KNOWN_INPUTS)
    if unknown:
        return f"its processor makes inputs that are not known here: {', '.join(unknown)}"
    grid = tuple(inputs[f"{modality}_grid_thw"][0].tolist())
    if grid != geometry.grid:
        return f"its processor makes a grid of {grid} where {geometry.grid} was worked out"
    shown = inputs["input_ids"][0].tolist()
    expected = facts.placeholder_ids(modality, geometry)
    if not any(shown[i : i + len(expected)] == expected for i in range(len(shown) - len(expected) + 1)):
        return f"its processor does not lay out the {len(expected)} placeholder ids that were worked out"
    return None


def _run_processor(processor: Any, modality: Modality, num_frames: int, height: int, width: int) -> Any:
    """The processor's outputs for a blank. A meta tensor has a shape and no pixels: only the arithmetic is done."""
    blank = torch.empty(num_frames, 3, height, width, dtype=torch.uint8, device="meta")
    options: dict[str, Any] = {"return_tensors": "pt", "input_data_format": "channels_first"}
    if modality == "image":
        return processor(text=[processor.image_token], images=[blank[0]], **options)
    indices = list(range(num_frames))
    metadata = {"total_num_frames": num_frames, "fps": _RATE_FPS, "frames_indices": indices}
    options["videos_kwargs"] = {"video_metadata": [metadata], "do_sample_frames": False}
    return processor(text=[processor.video_token], videos=[blank], **options)
