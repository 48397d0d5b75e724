"""Decoded frames as records of the store, so that another model need not have them decoded again. Lossless.

Each pixel is kept as its difference (modulo 256) from the one to its left, compressed by zstd at level 1. Measured by
`scripts/bench/frames` (numpy 2.4, pyarrow 26, one thread; eight frames of 336 x 448 of each of three videos, two
photographs): 0.28 to 0.62 of the raw bytes; 2.4 to 4.0 ms of processor time a MB of pixels to write and 1.5 to 1.9 to
read, where decoding the same took 6 (JPEG) to 114 (H.264 of 720 lines). Beside these bytes zstd without the differences
takes 1.3 to 1.7 times as many, LZ4 1.3 to 1.9, QOI 1.1 to 1.2, PNG 0.9 to 1.05 at 12 to 22 ms a MB to write, and
lossless WebP 0.56 to 0.75 at 157 to 342.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.features.codec import FeatureRecord, TensorView
from pipeline.features.identity import FrameKeyTerms
from pipeline.schema import Frames, Geometry, Modality, Placeholder

_ZSTD_LEVEL = 1
# Named by how it is coded: what another version codes otherwise has another name, and is a miss for this one.
_PIXELS = "frames.left-difference.zstd"
_TIMES = "pts_seconds"
_NO_PLACEHOLDER = Placeholder(text="", runs=())


def frame_record(
    frames: Frames,
    terms: FrameKeyTerms,
    modality: Modality,
    original_size: tuple[int, int],
    made_seconds: float = 0.0,
) -> FeatureRecord:
    """`frames` as a record, whose geometry counts pixels: its grid is (T, H, W), its length the number of frames."""
    num_frames, height, width, _ = frames.pixels.shape
    return FeatureRecord(
        key_terms=terms.as_dict(),
        tensors={
            _PIXELS: TensorView.of(np.frombuffer(_compressed(frames.pixels), np.uint8)),
            _TIMES: TensorView.of(np.array(frames.pts_seconds, np.float64)),
        },
        container="tensor",
        unit="frame",
        geometry=Geometry(
            grid=(num_frames, height, width),
            merge_size=1,
            feature_length=num_frames,
            original_size=original_size,
            resized_size=terms.resized_size,
            cropped_size=terms.cropped_size,
        ),
        placeholder=_NO_PLACEHOLDER,
        slot=modality,
        made_seconds=made_seconds,
    )


def record_frames(record: FeatureRecord) -> Frames:
    """The frames of a record, in memory of their own. Raises `ValueError` when it has none that can be read."""
    pixels, times = record.tensors.get(_PIXELS), record.tensors.get(_TIMES)
    if pixels is None or times is None:
        raise ValueError(f"a record of frames has {_PIXELS} and {_TIMES}, got {list(record.tensors)}")
    return Frames(pixels=_decompressed(pixels, record.geometry.grid), pts_seconds=tuple(times.numpy().tolist()))


def frame_bytes(record: FeatureRecord) -> int:
    """What the pixels of a record of frames take in the store."""
    return math.prod(record.tensors[_PIXELS].shape)


def _compressed(pixels: npt.NDArray[np.uint8]) -> bytes:
    difference = pixels.copy()  # (T, H, W, 3)
    difference[:, :, 1:] -= pixels[:, :, :-1]
    return pa.Codec("zstd", _ZSTD_LEVEL).compress(difference, asbytes=True)  # type: ignore[no-any-return]


def _decompressed(coded: TensorView, grid: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    shape = (*grid, 3)
    try:
        difference = pa.Codec("zstd").decompress(coded.data, math.prod(shape))
    except OSError as error:  # what Arrow makes of zstd's errors
        raise ValueError(f"frames that zstd cannot read: {error}") from error
    return np.add.accumulate(np.frombuffer(difference, np.uint8).reshape(shape), axis=2, dtype=np.uint8)
