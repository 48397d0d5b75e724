"""A small picture of a media item, for people."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

from pipeline.errors import ItemError
from pipeline.media.budget import Budget, admit
from pipeline.media.in_process import InProcess
from pipeline.media.resize import resize_frames
from pipeline.media.sandbox import Sandbox
from pipeline.media.source import FetchCounter, read_source
from pipeline.media.undecoded import Undecoded
from pipeline.media.url_policy import SourcePolicy
from pipeline.schema import MediaItem, ResourceVector, SamplePlan

_DPI = 72.0
_JPEG_QUALITY = 70


def thumbnail(
    media: MediaItem, longest_side: int, policy: SourcePolicy, limits: Budget, sandbox: Sandbox | None
) -> npt.NDArray[np.uint8] | None:
    """`uint8 (H, W, 3)` with the longer side of so many pixels; of a video, the frame at its middle.

    Decoded in `sandbox`, in this process for None. None for what can no longer be read, has no picture, or is over the
    limits: it may have been replaced since its run.
    """
    reader = sandbox or InProcess()
    try:
        data = read_source(media, FetchCounter(), policy)
        probe = reader.probe(
            io.BytesIO(data), num_bytes=len(data), declared=media.modality, name=media.name, page=media.page, dpi=_DPI
        )
        admit(
            ResourceVector(
                num_bytes=len(data),
                pixels_per_frame=probe.width * probe.height,
                num_frames=1,
                duration_seconds=probe.duration_seconds,
                feature_tokens=0,
            ),
            limits,
        )
    except ItemError:
        return None
    if probe.modality == "audio":
        return None
    plan = SamplePlan(pts_seconds=(probe.duration_seconds / 2,))
    size = _scaled_size(probe.height, probe.width, longest_side)
    [outcome] = reader.decode([Undecoded(data=data, probe=probe, plan=plan, size=size, page=media.page)])
    return None if isinstance(outcome.result, ItemError) else outcome.result.pixels[0].copy()


def scaled(picture: npt.NDArray[np.uint8], longest_side: int) -> npt.NDArray[np.uint8]:
    """`uint8 (H, W, 3)` with the longer side of so many pixels."""
    height, width, _ = picture.shape
    size = _scaled_size(height, width, longest_side)
    resized: npt.NDArray[np.uint8] = resize_frames(picture[None], size)[0]
    return resized


def _scaled_size(height: int, width: int, longest_side: int) -> tuple[int, int]:
    scale = longest_side / max(height, width)
    return max(1, round(height * scale)), max(1, round(width * scale))


def as_jpeg(pixels: npt.NDArray[np.uint8]) -> bytes:
    """The file of a picture for a page, `uint8 (H, W, 3)`, at some loss."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "jpeg", quality=_JPEG_QUALITY)
    return file.getvalue()


def as_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """The file of a picture, `uint8 (H, W, 3)`."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()
