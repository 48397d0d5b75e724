"""Frame vectors to the vector of their video. Pure."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

# Of a video of T frames the first weighs -5/T, the last 7/T. Not 1, 2, … T: with weights that are all positive, the
# shipped model told directions apart no better than chance (a clip's score is then an average of its frames' scores).
_FIRST_WEIGHT, _LAST_WEIGHT = -5.0, 7.0
FrameRule = Literal["mean", "trend"]


def pool_frames(vectors: npt.NDArray[np.float32], rule: FrameRule) -> npt.NDArray[np.float32]:
    """The vectors (T, D) of a video's frames, in order, to that of the video (D,), of length 1.

    Each frame's vector is brought to length 1; they are added with weights that are equal (`mean`), or rise linearly
    from -5/T to 7/T and sum to 1 (`trend`: what comes late counts for, what was there before against, which tells what
    moves left from what moves right); the sum is brought to length 1. One of zeros stays one.
    """
    if len(vectors) == 0:
        raise ValueError("a video has at least one frame, got none")
    trended = rule == "trend" and len(vectors) > 1
    weights = np.linspace(_FIRST_WEIGHT, _LAST_WEIGHT, len(vectors)) if trended else np.ones(len(vectors))
    return _unit(weights @ _unit(vectors.astype(np.float64))).astype(np.float32)


def _unit(vectors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0))
