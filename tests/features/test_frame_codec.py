"""Decoded frames come back from a record to the bit, and are coded as the format says."""

from __future__ import annotations

import dataclasses
from typing import Any

import imagecodecs
import numpy as np
import pytest

from pipeline.features.codec import TensorView, decode_record, encode_record
from pipeline.features.frames import frame_bytes, frame_record, record_frames
from pipeline.features.identity import FrameKeyTerms
from pipeline.schema import Frames

CODED = "frames.left-difference.zstd"
TERMS = FrameKeyTerms(
    tenant="acme",
    content="sha256:00",
    sampling=(0.0, 1.0),
    decode_backend="pyav",
    resize_backend="torch",
    resized_size=(20, 31),
    cropped_size=None,
    decode_rules=1,
)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, shape, np.uint8)


FRAMES = {
    "noise": noise(2, 20, 31, 3),
    "one column": noise(3, 5, 1, 3),
    "steps of 255": np.tile(np.array([0, 255], np.uint8), 20 * 30).reshape(1, 20, 20, 3),
    "a view with gaps": noise(4, 40, 40, 3)[::2, 3:23, 5:36],
    "flat": np.full((1, 64, 64, 3), 200, np.uint8),
}


@pytest.mark.parametrize("pixels", FRAMES.values(), ids=FRAMES.keys())
def test_they_come_back_to_the_bit(pixels: np.ndarray) -> None:
    times = tuple(k / 3 for k in range(len(pixels)))
    before = pixels.copy()
    record = frame_record(Frames(pixels=pixels, pts_seconds=times), TERMS, "video", (480, 640))
    np.testing.assert_array_equal(pixels, before)  # the encoder is still to see them
    back = decode_record(encode_record(record))
    assert back.key_terms == TERMS.as_dict()
    assert (back.unit, back.slot, back.geometry.original_size) == ("frame", "video", (480, 640))
    frames = record_frames(back)
    np.testing.assert_array_equal(frames.pixels, pixels)
    assert frames.pts_seconds == times


def test_another_reader_of_zstd_finds_the_differences() -> None:
    pixels = FRAMES["noise"]
    record = frame_record(Frames(pixels=pixels, pts_seconds=(0.0, 0.5)), TERMS, "video", (20, 31))
    stored = record.tensors[CODED].numpy()
    assert frame_bytes(record) == stored.nbytes
    found = np.frombuffer(imagecodecs.zstd_decode(stored.tobytes()), np.uint8).reshape(pixels.shape)
    expected = np.diff(pixels.astype(np.int64), axis=2, prepend=0) % 256
    np.testing.assert_array_equal(found, expected)


def test_smooth_pictures_take_a_fraction() -> None:
    ramp = np.add.outer(np.arange(200), np.arange(300)).astype(np.uint8)
    pixels = np.repeat(ramp[None, :, :, None], 3, axis=3)
    record = frame_record(Frames(pixels=pixels, pts_seconds=(0.0,)), TERMS, "image", (200, 300))
    assert frame_bytes(record) < pixels.nbytes / 50


@pytest.mark.parametrize("broken", ["renamed", "no times", "cut", "not zstd", "too few times"])
def test_what_is_not_such_a_record_is_said(broken: str) -> None:
    pixels = FRAMES["noise"]
    record = frame_record(Frames(pixels=pixels, pts_seconds=(0.0, 0.5)), TERMS, "video", (20, 31))
    coded, times = record.tensors[CODED].numpy(), record.tensors["pts_seconds"]
    tensors: dict[str, dict[str, TensorView]] = {
        "renamed": {"frames.raw": record.tensors[CODED], "pts_seconds": times},
        "no times": {CODED: record.tensors[CODED]},
        "cut": {CODED: TensorView.of(coded[: len(coded) // 2]), "pts_seconds": times},
        "not zstd": {CODED: TensorView.of(noise(100)), "pts_seconds": times},
        "too few times": {CODED: record.tensors[CODED], "pts_seconds": TensorView.of(np.zeros(1))},
    }
    changes: dict[str, Any] = {"tensors": tensors[broken]}
    with pytest.raises(ValueError, match=r"frames|zstd"):
        record_frames(dataclasses.replace(record, **changes))
