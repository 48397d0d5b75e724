"""How a checkpoint's image processor sizes images, read from it; and the rest of its work, on images of that size.

Frames are resized and cropped where they are decoded, from the size alone; rescaling, normalising and cutting into
patches stay the processor's own work, beside the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoImageProcessor, ConvNextImageProcessor, LevitImageProcessor, PoolFormerImageProcessor

from pipeline.errors import ConfigError
from pipeline.media.resize import Resample, crop_frames, resize_frames
from pipeline.planning.image_size import ExactSize, ImageRule, MaxPatches, ResizeRule, ShortestEdge

Images: TypeAlias = Sequence[npt.NDArray[np.uint8]] | npt.NDArray[np.uint8]
_RESAMPLE: dict[Any, Resample] = {2: "bilinear", 3: "bicubic"}  # PIL's numbers
_SIZE_FIELDS = ("height", "width", "shortest_edge", "longest_edge", "max_height", "max_width")
_CONVNEXT_WHOLE_EDGE = 384  # from this size on ConvNeXt's processor warps images and cuts nothing off
_LEVIT_SCALE = 256 / 224
_TRIED_SIZES = (
    (48, 80),
    (90, 33),
    (61, 47),
    (301, 640),
)  # (height, width): wide, upright, odd, larger than most towers


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSizing:
    """An image is resized by a rule and a filter, then its middle of `crop` = (height, width) is shown, if given."""

    resize: ResizeRule
    resample: Resample
    crop: tuple[int, int] | None

    def rule(self, patch_size: int) -> ImageRule:
        """For planning, with patches of so many pixels a side."""
        return ImageRule(resize=self.resize, crop=self.crop, patch_size=patch_size)

    def apply(self, image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """uint8 (H, W, 3) of any size, as the network is shown it."""
        geometry = self.rule(1).geometry(*image.shape[:2])
        resized = resize_frames(image[None], geometry.resized_size, self.resample)
        return np.asarray(crop_frames(resized, geometry.cropped_size)[0])


def load_image_processor(where: str, path: str) -> Any:
    """The checkpoint's own. Raises `ConfigError`, which begins with `where`, when it cannot be loaded."""
    try:
        return AutoImageProcessor.from_pretrained(path)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{where}: its image processor cannot be loaded: {error}") from error


def read_sizing(where: str, processor: Any) -> ImageSizing:
    """What `processor` does before it rescales and normalises. Raises `ConfigError` for what cannot be planned."""
    resample = getattr(processor, "resample", None)
    if resample not in _RESAMPLE:
        raise ConfigError(f"{where}: its image processor resamples by {resample!r}, not bicubic or bilinear")
    resize, crop = _resize_and_crop(where, processor)
    return ImageSizing(resize=resize, resample=_RESAMPLE[resample], crop=crop)


def check_sizing(where: str, processor: Any, sizing: ImageSizing) -> None:
    """Raise `ConfigError` where `processor` makes other inputs of an image than of one that `sizing` was applied to.

    Of noise in several sizes; the numbers have to be the same bits.
    """
    rng = np.random.default_rng(3)
    for height, width in _TRIED_SIZES:
        image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        shown = shown_images(sizing, [sizing.apply(image)])
        theirs = processor(images=[image], return_tensors="pt", **_options(sizing, shown))
        ours = network_inputs(processor, sizing, shown)
        if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in ours):
            raise ConfigError(
                f"{where}: its image processor, {type(processor).__name__}, makes something else of an image of "
                f"{width} x {height} pixels than its settings say ({sizing}), and cannot be planned"
            )


def shown_images(sizing: ImageSizing, images: Images) -> list[torch.Tensor]:
    """uint8 (H, W, 3) tensors, as the network is shown them, of images that are resized, or cropped too.

    Raises `ValueError` for an image that has neither size.
    """
    for image in images:
        _check_size(sizing, image)
    crop = sizing.crop
    shown = [image if crop in (None, image.shape[:2]) else crop_frames(image[None], crop)[0] for image in images]
    return [torch.from_numpy(image) for image in shown]


def network_inputs(processor: Any, sizing: ImageSizing, shown: Sequence[torch.Tensor]) -> Any:
    """What the network takes for images as it is shown them, uint8 (H, W, 3); made on the device that has them."""
    tensors = [image.permute(2, 0, 1).contiguous() for image in shown]
    options: dict[str, Any] = {"do_resize": False, "input_data_format": "channels_first", "return_tensors": "pt"}
    return processor(images=tensors, **options, **_options(sizing, shown)).to(tensors[0].device)


def _options(sizing: ImageSizing, shown: Sequence[torch.Tensor]) -> dict[str, Any]:
    if not isinstance(sizing.resize, MaxPatches):
        return {}
    patch = sizing.resize.patch_size
    # The most in the batch, not the most there can be: the rest is masked padding either way.
    return {"max_num_patches": max((i.shape[0] // patch) * (i.shape[1] // patch) for i in shown)}


def _resize_and_crop(where: str, processor: Any) -> tuple[ResizeRule, tuple[int, int] | None]:
    if getattr(processor, "max_num_patches", None) is not None:
        return MaxPatches(patch_size=processor.patch_size, max_patches=processor.max_num_patches), None
    size: Any = getattr(processor, "size", None)
    crop = _crop(processor)
    names = {name for name in _SIZE_FIELDS if getattr(size, name, None)}
    resizes = getattr(processor, "do_resize", None)
    if resizes and names == {"height", "width"} and not isinstance(processor, PoolFormerImageProcessor):
        return ExactSize(height=size.height, width=size.width), crop
    if resizes and names == {"shortest_edge"}:
        return _by_edge(processor, size.shortest_edge, crop)
    raise ConfigError(f"{where}: its image processor resizes by {size}, which is not supported (do_resize = {resizes})")


def _by_edge(processor: Any, edge: int, crop: tuple[int, int] | None) -> tuple[ResizeRule, tuple[int, int] | None]:
    """As the `resize` of three families has it, which begins larger than it says, and of all others."""
    match processor:
        case ConvNextImageProcessor() if edge >= _CONVNEXT_WHOLE_EDGE:
            return ExactSize(height=edge, width=edge), crop
        case ConvNextImageProcessor():
            return ShortestEdge(edge=int(edge / processor.crop_pct)), crop or (edge, edge)
        case PoolFormerImageProcessor() if processor.crop_pct is not None:
            return ShortestEdge(edge=int(edge / processor.crop_pct)), crop
        case LevitImageProcessor():
            return ShortestEdge(edge=int(_LEVIT_SCALE * edge)), crop
        case _:
            return ShortestEdge(edge=edge), crop


def _crop(processor: Any) -> tuple[int, int] | None:
    if not getattr(processor, "do_center_crop", None):
        return None
    return processor.crop_size.height, processor.crop_size.width


def _check_size(sizing: ImageSizing, image: npt.NDArray[np.uint8]) -> None:
    height, width, channels = image.shape
    rule = sizing.resize
    match rule:
        case MaxPatches():
            fits = not (height % rule.patch_size or width % rule.patch_size)
        case ShortestEdge():
            fits = min(height, width) == rule.edge or (height, width) == sizing.crop
        case ExactSize():
            fits = (height, width) in ((rule.height, rule.width), sizing.crop)
    if channels != 3 or image.dtype != np.uint8 or not fits:
        raise ValueError(f"an image of {image.dtype} {image.shape} was not resized by {rule}")
