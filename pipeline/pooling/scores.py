"""Logits to scores, and frames' to their video's. Pure."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

VideoRule = Literal["mean", "max"]


def activate(logits: npt.NDArray[np.float32], activation: str) -> npt.NDArray[np.float32]:
    """Scores (…, labels) of logits, by the last part of a dotted name: Identity, Sigmoid or Softmax.

    Raises `ValueError` for another.
    """
    wide = logits.astype(np.float64)
    match activation.rpartition(".")[2]:
        case "Identity":
            scores = wide
        case "Sigmoid":
            # exp(-x) of a large negative x would overflow.
            scores = np.where(wide >= 0, 1.0, np.exp(-np.abs(wide))) / (1.0 + np.exp(-np.abs(wide)))
        case "Softmax":
            powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
            scores = powers / powers.sum(axis=-1, keepdims=True)
        case name:
            raise ValueError(f"scores are made of logits by Identity, Sigmoid or Softmax, got {name!r}")
    return scores.astype(np.float32)


def score_frames(logits: npt.NDArray[np.float32], activation: str, rule: VideoRule) -> npt.NDArray[np.float32]:
    """The logits (T, labels) of a video's frames to its scores (labels,).

    `mean`: the scores of the mean logits; `max`: of each label the highest score that a frame has.
    """
    if len(logits) == 0:
        raise ValueError("a video has at least one frame, got none")
    if rule == "max":
        return np.asarray(activate(logits, activation).max(axis=0))
    return activate(logits.mean(axis=0, dtype=np.float64), activation)
