"""Frame vectors to the vector of their video. Pure."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

FrameRule = Literal["mean", "rising"]


def pool_frames(vectors: npt.NDArray[np.float32], rule: FrameRule) -> npt.NDArray[np.float32]:
    """The vectors (T, D) of a video's frames, in order, to that of the video (D,), of length 1.

    Each frame's vector is brought to length 1, then their mean: of equal weights (`mean`), or of weights 1, 2, … T
    (`rising`), which tells what moves left from what moves right. One of zeros stays one.
    """
    if len(vectors) == 0:
        raise ValueError("a video has at least one frame, got none")
    weights = np.arange(1, len(vectors) + 1) if rule == "rising" else np.ones(len(vectors))
    mean = np.average(_unit(vectors.astype(np.float64)), axis=0, weights=weights)
    return _unit(mean).astype(np.float32)


def _unit(vectors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0))
