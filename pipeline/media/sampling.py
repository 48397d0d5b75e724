"""Which frames of a clip are taken: presentation times from header facts and a policy. Pure."""

from __future__ import annotations

import math
from typing import Literal, Protocol

from pipeline.schema import Probe, SamplePlan


class SamplingPolicy(Protocol):
    """What `pipeline.config.Sampling` holds; any object with these fields will do."""

    @property
    def policy(self) -> Literal["fps", "uniform"]: ...
    @property
    def fps(self) -> float: ...
    @property
    def num_frames(self) -> int: ...
    @property
    def min_frames(self) -> int: ...
    @property
    def max_frames(self) -> int: ...


def sample_plan(probe: Probe, sampling: SamplingPolicy) -> SamplePlan:
    """The times to show, in seconds from the first frame; one at 0 for an image or a page.

    `fps`: k / fps for every k with k / fps < duration, held between `min_frames` and `max_frames` by taking that many
    uniform ones instead. `uniform`: `num_frames` from the first frame to the last, both included. Neither passes the
    last frame's time, nor takes more frames than the header promises (600 frames at 30 fps: 1 fps takes 20).
    """
    if probe.modality != "video":
        return SamplePlan(pts_seconds=(0.0,))
    last = _last_pts_seconds(probe)
    most = probe.num_frames if probe.num_frames > 0 else math.inf
    if sampling.policy == "uniform":
        return _uniform(int(min(sampling.num_frames, most)), last)
    count = _frames_at_rate(probe.duration_seconds, sampling.fps)
    allowed = int(min(max(count, sampling.min_frames), sampling.max_frames, most))
    if allowed != count:
        return _uniform(allowed, last)
    return SamplePlan(pts_seconds=tuple(min(k / sampling.fps, last) for k in range(count)))


def _last_pts_seconds(probe: Probe) -> float:
    frame = 1 / probe.rate_fps if probe.rate_fps > 0 else 0.0
    return max(0.0, probe.duration_seconds - frame)


def _frames_at_rate(duration_seconds: float, fps: float) -> int:
    """How many k >= 0 have k / fps < duration. The product rounds, so its neighbours are tried by division."""
    count = math.ceil(duration_seconds * fps)
    while count > 0 and (count - 1) / fps >= duration_seconds:
        count -= 1
    while count / fps < duration_seconds:
        count += 1
    return count


def _uniform(count: int, last: float) -> SamplePlan:
    if count == 1:
        return SamplePlan(pts_seconds=(0.0,))
    return SamplePlan(pts_seconds=tuple(min(last * i / (count - 1), last) for i in range(count)))
