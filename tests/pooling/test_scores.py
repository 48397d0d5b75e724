"""Logits to scores beside torch's own functions; a video's by arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pipeline.pooling.scores import activate, score_frames


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("torch.nn.modules.linear.Identity", lambda x: x),
        ("torch.nn.modules.activation.Sigmoid", torch.sigmoid),
        ("torch.nn.modules.activation.Softmax", lambda x: x.softmax(-1)),
    ],
)
def test_scores_are_those_of_torch(activation: str, function: object) -> None:
    logits = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32) * 30
    logits[0] = [-800, 800, 0, 1e4, -1e4]  # where exp overflows
    expected = function(torch.from_numpy(logits).double()).float().numpy()  # type: ignore[operator]
    with np.errstate(all="raise", under="ignore"):
        scores = activate(logits, activation)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected, rtol=1e-6)


def test_other_activations_are_refused() -> None:
    with pytest.raises(ValueError, match="Tanh"):
        activate(np.zeros((1, 2), np.float32), "torch.nn.modules.activation.Tanh")


def test_a_videos_scores_by_either_rule() -> None:
    logits = np.array([[0.0, 2.0], [4.0, 0.0]], np.float32)
    e = math.e
    np.testing.assert_allclose(score_frames(logits, "Softmax", "mean"), [e / (1 + e), 1 / (1 + e)], rtol=1e-6)
    first, second = 1 / (1 + e**2), e**4 / (1 + e**4)
    np.testing.assert_allclose(score_frames(logits, "Softmax", "max"), [second, 1 - first], rtol=1e-6)
    assert score_frames(logits, "Identity", "mean").tolist() == [2.0, 1.0]
    assert score_frames(logits, "Identity", "max").tolist() == [4.0, 2.0]
    assert score_frames(logits[:1], "Identity", "mean").tolist() == [0.0, 2.0]


def test_a_number_that_is_none_stays_one() -> None:
    logits = np.array([[0.0, 2.0], [np.nan, 0.0]], np.float32)
    for rule in ("mean", "max"):
        assert np.isnan(score_frames(logits, "Sigmoid", rule)[0])  # type: ignore[arg-type]


def test_no_frames_are_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="at least one frame"):
        score_frames(np.zeros((0, 2), np.float32), "Identity", "mean")
