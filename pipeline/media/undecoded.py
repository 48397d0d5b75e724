"""What a decoder is handed, and what becomes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import BinaryIO

from pipeline.errors import ItemError
from pipeline.media.resize import Resample
from pipeline.schema import DEFAULT_IMAGE_RULES, Frames, ImageRules, Probe, SamplePlan

# What an item may take: measured were 32 bytes a pixel for 16-bit grey, and 17 frames of 3 bytes are what a decoder of
# 10-bit video keeps at most.
_ROOM_BYTES = 256 * 2**20
_BYTES_PER_PIXEL = 64
_INDEX_BYTES = 256 * 2**20  # of a video that is read by range: 200 bytes a packet, and as much of libav's


@dataclass(frozen=True, kw_only=True, slots=True)
class Undecoded:
    """What `decode_media` is called with. For a `size` of None, it is what `probe` says.

    `file` is given instead of bytes where it is read by range.
    """

    data: bytes = b""
    file: BinaryIO | None = None
    probe: Probe
    plan: SamplePlan
    size: tuple[int, int] | None
    resample: Resample = "bicubic"
    page: int | None = None
    dct_scaled: bool = False
    at_keyframes: bool = False
    rules: ImageRules = DEFAULT_IMAGE_RULES

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(T, H, W, 3) of what comes of it."""
        height, width = self.size or (self.probe.height, self.probe.width)
        return len(self.plan), height, width, 3

    @property
    def num_pixels(self) -> int:
        """Of the frames to take, at their own size."""
        return self.probe.width * self.probe.height * len(self.plan)

    @property
    def room_bytes(self) -> int:
        """What decoding may take: a power of two, so that most items have the same."""
        frame = _BYTES_PER_PIXEL * self.probe.width * self.probe.height
        stream = 2 * len(self.data) if self.file is None else _INDEX_BYTES
        more = (stream + frame + 2 * math.prod(self.shape)) / _ROOM_BYTES
        return int(_ROOM_BYTES * 2 ** math.ceil(math.log2(1 + more)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of an item, and how long that took."""

    result: Frames | ItemError
    seconds: float
