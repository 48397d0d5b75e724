"""The decoding seam: whatever is probed, planned and sized comes out as `Frames`."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np

from pipeline.errors import ItemError
from pipeline.media.document import render_page
from pipeline.media.image import decode_image
from pipeline.media.resize import Resample, resize_frames
from pipeline.media.video import decode_video
from pipeline.schema import DEFAULT_IMAGE_RULES, Frames, ImageRules, Probe, SamplePlan


def decode_media(
    file: BinaryIO,
    probe: Probe,
    plan: SamplePlan,
    size: tuple[int, int] | None,
    resample: Resample = "bicubic",
    *,
    page: int | None = None,
    dct_scaled: bool = False,
    by_range: bool = False,
    at_keyframes: bool = False,
    rules: ImageRules = DEFAULT_IMAGE_RULES,
) -> Frames:
    """The planned frames of `file`, upright RGB, at `size` = (height, width), or as presented for None.

    A page (from 0) of a PDF is one frame. `dct_scaled` is of JPEGs, `rules` of images: see `decode_image`; `by_range`
    (MP4, MOV, Matroska) and `at_keyframes` are of videos: see `decode_video`. Raises `ItemError` (stage `decode`):
    `truncated`, `corrupt`, `unknown_format`, `unsupported_mode`, `wrong_size` for an image of another size than was
    probed and admitted, what `render_page` raises, and `wrong_frame_count` when `plan` was made for another modality.
    """
    match probe.modality:
        case "image":
            frames = decode_image(
                file, size, resample, dct_scaled=dct_scaled, rules=rules, admitted=(probe.height, probe.width)
            )
        case "video":
            frames = decode_video(file, plan, size, resample, by_range=by_range, at_keyframes=at_keyframes)
        case "page":
            assert page is not None, "a page was probed by its number, and is decoded by it"
            frames = _decode_page(file, page, (probe.height, probe.width), size, resample)
        case "audio":
            raise ValueError("a sound has no frames; its samples come from pipeline.media.audio")
    if len(frames.pts_seconds) != len(plan):
        raise ItemError(
            "decode",
            "wrong_frame_count",
            f"{len(plan)} frames planned, the {probe.modality} gave {len(frames.pts_seconds)}",
        )
    return frames


def _decode_page(
    file: BinaryIO, page: int, drawn: tuple[int, int], size: tuple[int, int] | None, resample: Resample
) -> Frames:
    # Drawn at the resolution that it was probed for and then resized, as the model's processor would resize that
    # picture. Drawn at `size` at once, letters of a few pixels are moved and thinned: on pages of text, 756 x 588 to
    # 224 x 168, pixels were off by 8 to 12 levels (rms, from the mean of 4 x 4 finer ones) where these are off by 3 to
    # 8. It takes 10 ms a page of text instead of 6, and 100 instead of 64 for one scanned at 300 dots an inch.
    pixels = render_page(file, page, drawn)[np.newaxis]  # (1, H, W, 3)
    return Frames(pixels=pixels if size is None else resize_frames(pixels, size, resample), pts_seconds=(0.0,))
