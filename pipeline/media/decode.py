"""The decoding seam: whatever is probed, planned and sized comes out as `Frames`."""

from __future__ import annotations

from typing import BinaryIO

from pipeline.errors import ItemError
from pipeline.media.image import decode_image
from pipeline.media.resize import Resample
from pipeline.media.video import decode_video
from pipeline.schema import Frames, Probe, SamplePlan


def decode_media(
    file: BinaryIO, probe: Probe, plan: SamplePlan, size: tuple[int, int] | None, resample: Resample = "bicubic"
) -> Frames:
    """The planned frames of `file`, upright RGB, at `size` = (height, width), or as presented for None.

    Raises `ItemError` (stage `decode`): `truncated`, `corrupt`, `unknown_format`, `unsupported_mode`, and
    `wrong_frame_count` when `plan` was made for another modality.
    """
    image = probe.modality == "image"
    frames = decode_image(file, size, resample) if image else decode_video(file, plan, size, resample)
    if len(frames.pts_seconds) != len(plan):
        raise ItemError(
            "decode",
            "wrong_frame_count",
            f"{len(plan)} frames planned, the {probe.modality} gave {len(frames.pts_seconds)}",
        )
    return frames
