"""Which frames of a clip are taken: presentation times from header facts and a policy. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol

from pipeline.errors import ItemError
from pipeline.schema import Probe, SamplePlan


class SamplingPolicy(Protocol):
    """What `pipeline.config.Sampling` holds; any object with these fields will do."""

    @property
    def policy(self) -> Literal["fps", "uniform", "every_n_seconds", "timestamps", "keyframes", "model"]: ...
    @property
    def fps(self) -> float: ...
    @property
    def every_n_seconds(self) -> float: ...
    @property
    def timestamps(self) -> tuple[float, ...]: ...
    @property
    def num_frames(self) -> int: ...
    @property
    def min_frames(self) -> int: ...
    @property
    def max_frames(self) -> int: ...


def sample_plan(probe: Probe, sampling: SamplingPolicy) -> SamplePlan:
    """The times to show, in seconds from the first frame; one at 0 for an image or a page.

    `fps`: k / fps for every k with k / fps < duration, held between `min_frames` and `max_frames` by taking that many
    uniform ones instead; `every_n_seconds`: likewise at 1 / every_n_seconds, from one frame on. `uniform`, `keyframes`:
    `num_frames` from the first frame to the last, both included. `timestamps`: those before the end. None passes the
    last frame's time, nor takes more frames than the header promises (600 frames at 30 fps: 1 fps takes 20).

    Not for `model`, whose times the model's own processor says. Raises `ItemError` (stage `plan`) `no_frame_sampled`
    when all timestamps are behind the end.
    """
    if probe.modality != "video":
        return SamplePlan(pts_seconds=(0.0,))
    last = _last_pts_seconds(probe)
    most = probe.num_frames if probe.num_frames > 0 else math.inf
    match sampling.policy:
        case "fps":
            return _at_rate(probe, sampling.fps, last, sampling.min_frames, min(sampling.max_frames, most))
        case "every_n_seconds":
            return _at_rate(probe, 1 / sampling.every_n_seconds, last, 1, min(sampling.max_frames, most))
        case "uniform" | "keyframes":
            return _uniform(int(min(sampling.num_frames, most)), last)
        case "timestamps":
            return _before_the_end(probe, sampling.timestamps, last)
        case "model":
            raise ValueError("policy: model is for the model's own processor")


def indices_plan(probe: Probe, indices: Sequence[int]) -> SamplePlan:
    """The times of frames that are numbered from 0, of a video of constant rate, ascending.

    The middle of each, for containers round the times at which frames begin (WebM to milliseconds), and by duration and
    count, for what headers say of rates is rounded, too.
    """
    frame_seconds = probe.duration_seconds / max(1, probe.num_frames)
    last = max(0.0, probe.duration_seconds - frame_seconds / 2)
    return SamplePlan(pts_seconds=tuple(min((index + 0.5) * frame_seconds, last) for index in sorted(indices)))


def _at_rate(probe: Probe, fps: float, last: float, least: int, most: float) -> SamplePlan:
    count = _frames_at_rate(probe.duration_seconds, fps)
    allowed = int(min(max(count, least), most))
    if allowed != count:
        return _uniform(allowed, last)
    return SamplePlan(pts_seconds=tuple(min(k / fps, last) for k in range(count)))


def _before_the_end(probe: Probe, timestamps: Sequence[float], last: float) -> SamplePlan:
    times = tuple(min(t, last) for t in timestamps if t < probe.duration_seconds)
    if not times:
        raise ItemError(
            "plan",
            "no_frame_sampled",
            f"the video ends after {probe.duration_seconds:.3f} s, the first timestamp is {timestamps[0]:.3f}",
        )
    return SamplePlan(pts_seconds=times)


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
