"""Resizing that equals what torchvision, and so the models' own processors, would have made of the same pixels."""

from __future__ import annotations

from importlib.metadata import version
from typing import Literal

import numpy as np
import numpy.typing as npt

RESIZE_BACKEND: str = f"torch-uint8-bicubic-antialias/{version('torch').split('+')[0]}"


Resample = Literal["bicubic", "bilinear"]


def resize_frames(
    pixels: npt.NDArray[np.uint8], size: tuple[int, int], resample: Resample = "bicubic"
) -> npt.NDArray[np.uint8]:
    """`uint8 (T, H, W, 3)` at `size` = (height, width); `pixels` itself when it has that size already.

    Bit-equal to `torchvision.transforms.v2.functional.resize(…, antialias=True)` on a uint8 CPU tensor, which calls the
    same uint8 kernel (`transforms/v2/functional/_geometry.py`, `resize_image`); channels-last skips its repacking.
    """
    if pixels.shape[1:3] == size:
        return pixels
    # Not at the top: drivers and planners name the back end in keys and never resize; torch takes seconds to import.
    import torch
    from torch.nn import functional

    frames = torch.from_numpy(np.require(pixels, requirements=["C", "W"])).permute(0, 3, 1, 2)
    resized = functional.interpolate(frames, size=size, mode=resample, align_corners=False, antialias=True)
    return resized.permute(0, 2, 3, 1).contiguous().numpy()


def crop_frames(pixels: npt.NDArray[np.uint8], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """The middle `size` = (height, width) of `uint8 (T, H, W, 3)`, as image processors crop; black where it is smaller.

    Equal to `center_crop` in transformers' `image_processing_backends.py`: odd remainders go to the right and bottom.
    """
    missing = [max(0, wanted - side) for wanted, side in zip(size, pixels.shape[1:3], strict=True)]
    margins = [(0, 0), *((gap // 2, (gap + 1) // 2) for gap in missing), (0, 0)]
    padded = np.pad(pixels, margins) if any(missing) else pixels
    top, left = ((side - wanted) // 2 for wanted, side in zip(size, padded.shape[1:3], strict=True))
    return np.ascontiguousarray(padded[:, top : top + size[0], left : left + size[1]])
