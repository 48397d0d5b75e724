"""A small picture of a media item, for people."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

from pipeline.errors import ItemError
from pipeline.media.decode import decode_media
from pipeline.media.probe import probe_media
from pipeline.media.resize import resize_frames
from pipeline.media.source import FetchCounter, read_source
from pipeline.media.url_policy import SourcePolicy
from pipeline.schema import MediaItem, SamplePlan

_DPI = 72.0


def thumbnail(media: MediaItem, longest_side: int, policy: SourcePolicy) -> npt.NDArray[np.uint8] | None:
    """`uint8 (H, W, 3)` with the longer side of so many pixels; of a video, the frame at its middle.

    None for what can no longer be read.
    """
    try:
        data = read_source(media, FetchCounter(), policy)
        file = io.BytesIO(data)
        probe = probe_media(
            file, num_bytes=len(data), declared=media.modality, name=media.name, page=media.page, dpi=_DPI
        )
        plan = SamplePlan(pts_seconds=(probe.duration_seconds / 2,))
        frames = decode_media(io.BytesIO(data), probe, plan, None, page=media.page)
    except ItemError:
        return None
    return scaled(frames.pixels[0], longest_side)


def scaled(picture: npt.NDArray[np.uint8], longest_side: int) -> npt.NDArray[np.uint8]:
    """`uint8 (H, W, 3)` with the longer side of so many pixels."""
    height, width = picture.shape[:2]
    scale = longest_side / max(height, width)
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    resized: npt.NDArray[np.uint8] = resize_frames(picture[None], size)[0]
    return resized


def as_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """The file of a picture, `uint8 (H, W, 3)`."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()
