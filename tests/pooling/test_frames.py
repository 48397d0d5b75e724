"""Frame vectors to video vectors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.pooling.frames import pool_frames


def test_a_video_vector_is_the_normalised_mean_of_normalised_frames() -> None:
    half = math.sqrt(0.5)  # a long and a short frame vector count the same
    video = pool_frames(np.array([[10, 0], [0, 1]], dtype=np.float32), "mean")
    np.testing.assert_allclose(video, [half, half], atol=1e-6)
    assert video.dtype == np.float32
    np.testing.assert_allclose(pool_frames(np.array([[3, 4]], dtype=np.float32), "mean"), [0.6, 0.8], atol=1e-6)


def test_a_trend_tells_a_video_from_its_reverse() -> None:
    frames = np.array([[2, 0], [0, 5]], dtype=np.float32)
    length = math.sqrt(25 + 49)  # weights -5/2 and 7/2
    np.testing.assert_allclose(pool_frames(frames, "trend"), [-5 / length, 7 / length], atol=1e-6)
    np.testing.assert_allclose(pool_frames(frames[::-1], "trend"), [7 / length, -5 / length], atol=1e-6)
    three = np.array([[1, 0], [0, 1], [1, 0]], dtype=np.float32)  # weights -5/3, 1/3, 7/3
    np.testing.assert_allclose(pool_frames(three, "trend"), np.array([2, 1]) / math.sqrt(5), atol=1e-6)
    np.testing.assert_allclose(pool_frames(frames[1:], "trend"), [0, 1])


def test_frames_that_cancel_leave_zeros_and_no_frames_are_refused() -> None:
    assert pool_frames(np.array([[1, 0], [-1, 0]], dtype=np.float32), "mean").tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="at least one frame"):
        pool_frames(np.zeros((0, 2), np.float32), "mean")
