"""Patch grids and feature lengths from original sizes, without pixels. Pure.

The arithmetic is that of transformers' `smart_resize` for Qwen2-VL images (`image_processing_qwen2_vl.py`) and Qwen3-VL
videos (`video_processing_qwen3_vl.py`), which tests compare with the processors themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pipeline.errors import ItemError
from pipeline.planning.image_size import ImageRule
from pipeline.planning.tiling import TileRule
from pipeline.schema import Geometry, Modality, Probe

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchRule:
    """A processor with dynamic resolution: sides become multiples of patch x merge, pixels stay within bounds.

    Pixel bounds count all frames of an item (one for an image). `max_tokens_per_frame` caps a video's frames besides.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    max_tokens_per_frame: int | None = None

    @property
    def factor(self) -> int:
        """Pixels a side of one merged token."""
        return self.patch_size * self.merge_size

    def most_pixels(self, num_frames: int) -> int:
        """Of what the model is shown of an item with so many frames, at most."""
        return self.max_pixels


@dataclass(frozen=True, kw_only=True, slots=True)
class FramePatchRule:
    """As `PatchRule`, of videos whose pixel bounds hold for each frame (Qwen2-VL and Qwen2.5-VL).

    `max_video_tokens`, where it is given, lowers the upper bound of long videos. The arithmetic is that of
    `Qwen2VLVideoProcessor.resize` (`models/qwen2_vl/video_processing_qwen2_vl.py`).
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    max_video_tokens: int | None = None

    def geometry(self, num_frames: int, height: int, width: int) -> Geometry:
        """Of a video whose frames its processor resizes. Raises `ItemError` for extreme aspect ratios."""
        rule = PatchRule(
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            temporal_patch_size=self.temporal_patch_size,
            min_pixels=self.min_pixels,
            max_pixels=self._max_pixels(num_frames),
        )
        size = _bounded(rule, 1, height, width, rule.max_pixels)
        made = _geometry(rule, math.ceil(num_frames / self.temporal_patch_size), (height, width), size)
        return replace(made, resized_size=(height, width))

    def _max_pixels(self, num_frames: int) -> int:
        if self.max_video_tokens is None:
            return self.max_pixels
        # Nine tenths, in their order of operations: `int` cuts off.
        share = int(self.max_video_tokens * (self.patch_size * self.merge_size) ** 2 * 0.9)
        return max(min(self.max_pixels, share * self.temporal_patch_size // num_frames), int(self.min_pixels * 1.05))


SizeRule = PatchRule | ImageRule
# Of frames that reach the processor in their own size.
OwnSizeRule = FramePatchRule | TileRule


def image_geometry(rule: PatchRule, height: int, width: int) -> Geometry:
    """The geometry of one image of `height` x `width` pixels. Raises `ItemError` for extreme aspect ratios."""
    size = _bounded(rule, 1, height, width, rule.max_pixels)
    return _geometry(rule, 1, (height, width), size)


def video_geometry(rule: PatchRule, num_frames: int, height: int, width: int) -> Geometry:
    """The geometry of `num_frames` sampled frames (at least `temporal_patch_size`) of `height` x `width` pixels."""
    if num_frames < rule.temporal_patch_size:
        raise ValueError(f"{num_frames = } is below the temporal patch size {rule.temporal_patch_size}")
    if min(height, width) < rule.factor:
        scale = max(rule.factor / height, rule.factor / width)
        enlarged = int(height * scale), int(width * scale)
    else:
        enlarged = height, width
    size = _bounded(rule, num_frames, *enlarged, _max_video_pixels(rule, num_frames))
    return _geometry(rule, math.ceil(num_frames / rule.temporal_patch_size), (height, width), size)


def rule_geometry(rule: PatchRule, modality: Modality, num_frames: int, height: int, width: int) -> Geometry:
    """`image_geometry` or `video_geometry`, as `modality` asks."""
    if modality == "image":
        return image_geometry(rule, height, width)
    return video_geometry(rule, num_frames, height, width)


def probed_geometry(rule: SizeRule, probe: Probe, num_frames: int) -> Geometry:
    """`rule_geometry` or `framewise_geometry` of an item that was probed, with its duration."""
    if isinstance(rule, ImageRule):
        geometry = framewise_geometry(rule, num_frames, probe.height, probe.width)
    else:
        geometry = rule_geometry(rule, probe.modality, num_frames, probe.height, probe.width)
    # An image has no duration, and a second value costs as much as the arithmetic.
    return replace(geometry, duration_seconds=probe.duration_seconds) if probe.duration_seconds else geometry


def own_size_geometry(rule: OwnSizeRule, probe: Probe, num_frames: int) -> Geometry:
    """Of an item that was probed, whose frames the model's processor is handed as they are."""
    size = (probe.height, probe.width)
    if isinstance(rule, FramePatchRule):
        return replace(rule.geometry(num_frames, *size), duration_seconds=probe.duration_seconds)
    grid, feature_length = rule.counts(num_frames, *size)
    return Geometry(
        grid=grid,
        merge_size=1,
        feature_length=feature_length,
        original_size=size,
        resized_size=size,
        duration_seconds=probe.duration_seconds,
    )


def framewise_geometry(rule: ImageRule, num_frames: int, height: int, width: int) -> Geometry:
    """Of an image, or of frames that are images each and make one vector each."""
    shown = rule.geometry(height, width)
    return Geometry(
        grid=(num_frames, *shown.grid),
        merge_size=1,
        feature_length=num_frames,
        original_size=(height, width),
        resized_size=shown.resized_size,
        cropped_size=None if shown.cropped_size == shown.resized_size else shown.cropped_size,
    )


def _max_video_pixels(rule: PatchRule, num_frames: int) -> int:
    if rule.max_tokens_per_frame is None:
        return rule.max_pixels
    per_frame = min(rule.max_tokens_per_frame * rule.factor**2, rule.max_pixels // num_frames)
    return max(per_frame, int(rule.min_pixels * 1.05)) * num_frames


def _bounded(rule: PatchRule, num_frames: int, height: int, width: int, max_pixels: int) -> tuple[int, int]:
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise ItemError(
            "plan", "extreme_aspect_ratio", f"{width} x {height} is {ratio:.0f}:1, at most {MAX_ASPECT_RATIO}:1 works"
        )
    factor = rule.factor
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    # An image counts once; a video counts its frames rounded to whole temporal patches against the bounds.
    counted = 1 if num_frames == 1 else round(num_frames / rule.temporal_patch_size) * rule.temporal_patch_size
    if counted * rows * columns > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        return tuple(max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))  # type: ignore[return-value]
    if counted * rows * columns < rule.min_pixels:
        grow = math.sqrt(rule.min_pixels / (num_frames * height * width))
        return tuple(math.ceil(side * grow / factor) * factor for side in (height, width))  # type: ignore[return-value]
    return rows, columns


def _geometry(rule: PatchRule, grid_t: int, original: tuple[int, int], resized: tuple[int, int]) -> Geometry:
    grid = (grid_t, resized[0] // rule.patch_size, resized[1] // rule.patch_size)
    return Geometry(
        grid=grid,
        merge_size=rule.merge_size,
        feature_length=math.prod(grid) // rule.merge_size**2,
        original_size=original,
        resized_size=resized,
    )
