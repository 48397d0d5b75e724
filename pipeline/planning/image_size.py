"""The size that a dual encoder's images take, from their original size, without pixels. Pure.

The arithmetic is that of the image processors of CLIP, SigLIP and SigLIP 2 in transformers
(`get_resize_output_image_size` and `get_size_dict` in `image_transforms.py` and `image_processing_utils.py`,
`get_image_size_for_max_num_patches` in `models/siglip2/image_processing_siglip2.py`), which tests compare with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactSize:
    """Every image is resized to (height, width), whatever its aspect ratio."""

    height: int
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortestEdge:
    """The shorter side is resized to `edge` pixels; the longer one keeps the aspect ratio, rounded down."""

    edge: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxPatches:
    """Both sides become multiples of `patch_size`, as large as keeps their patches within `max_patches` (NaFlex)."""

    patch_size: int
    max_patches: int


ResizeRule = ExactSize | ShortestEdge | MaxPatches


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRule:
    """How a dual encoder's processor sizes an image: resized by a rule, then the middle of it, if it crops.

    Frames of a video are images, each by itself.
    """

    resize: ResizeRule
    crop: tuple[int, int] | None
    patch_size: int

    def geometry(self, height: int, width: int) -> ImageGeometry:
        """What an image of `height` x `width` pixels is resized and cropped to, and its patches."""
        size = resized_size(self.resize, height, width)
        rows, columns = shown = self.crop or size
        grid = (rows // self.patch_size, columns // self.patch_size)
        return ImageGeometry(resized_size=size, cropped_size=shown, grid=grid)

    @property
    def temporal_patch_size(self) -> int:
        """Frames that make one patch."""
        return 1

    def most_pixels(self, num_frames: int) -> int:
        """Of what the model is shown of an item with so many frames, at most."""
        match self.resize:
            case _ if self.crop is not None:
                pixels = math.prod(self.crop)
            case ExactSize():
                pixels = self.resize.height * self.resize.width
            case MaxPatches():
                pixels = self.resize.max_patches * self.resize.patch_size**2
            case ShortestEdge():
                raise ValueError(f"{self.resize} without a crop has no largest image")
        return num_frames * pixels


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageGeometry:
    """Sizes are (height, width): resized to `resized_size`, then `cropped_size` of its centre is shown to the model.

    `grid` is (rows, columns) of patches. Images of one `cropped_size` can be in one batch.
    """

    resized_size: tuple[int, int]
    cropped_size: tuple[int, int]
    grid: tuple[int, int]


def resized_size(rule: ResizeRule, height: int, width: int) -> tuple[int, int]:
    """What an image of `height` x `width` pixels is resized to."""
    match rule:
        case ExactSize():
            return rule.height, rule.width
        case ShortestEdge():
            longer = int(rule.edge * max(height, width) / min(height, width))
            return (longer, rule.edge) if width <= height else (rule.edge, longer)
        case MaxPatches():
            return _most_patches(rule, height, width)


def _most_patches(rule: MaxPatches, height: int, width: int) -> tuple[int, int]:
    """What the processor's bisection of the scale ends at, without its two dozen steps where that is certain.

    A side has one patch more from each scale on at which it is whole patches. The bisection ends less than its
    tolerance below the largest scale that has no more patches than allowed: where no such scale lies in between, the
    sides there are the sides here.
    """
    patch, most = rule.patch_size, rule.max_patches
    scale = patch * math.sqrt(most / (height * width))  # has as many patches as allowed, were they not whole ones
    rows, columns = math.ceil(height * scale / patch), math.ceil(width * scale / patch)
    while rows * columns > most:
        rows, columns = _one_step_down(rows, columns, height, width)
    highest = min(rows * patch / height, columns * patch / width)
    lowest = max((rows - 1) * patch / height, (columns - 1) * patch / width)
    if lowest < highest - 2 * _TOLERANCE and highest < _HIGHEST_SCALE - 2 * _TOLERANCE:
        return rows * patch, columns * patch
    return _bisected(rule, height, width)


def _one_step_down(rows: int, columns: int, height: int, width: int) -> tuple[int, int]:
    """Patches along the sides just below the scale from which on there are as many."""
    by_rows, by_columns = (rows - 1) * width, (columns - 1) * height
    return rows - (by_rows >= by_columns), columns - (by_columns >= by_rows)


_TOLERANCE = 1e-5
_HIGHEST_SCALE = 100.0


def _bisected(rule: MaxPatches, height: int, width: int) -> tuple[int, int]:
    """As the processor does it, step by step."""

    def side(scale: float, pixels: int) -> int:
        return max(rule.patch_size, math.ceil(pixels * scale / rule.patch_size) * rule.patch_size)

    low, high = _TOLERANCE / 10, _HIGHEST_SCALE
    while high - low >= _TOLERANCE:
        scale = (low + high) / 2
        patches = (side(scale, height) / rule.patch_size) * (side(scale, width) / rule.patch_size)
        low, high = (scale, high) if patches <= rule.max_patches else (low, scale)
    return side(low, height), side(low, width)
