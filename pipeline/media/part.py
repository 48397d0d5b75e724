"""Parts of videos and sounds, from one time of the file to another. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from pipeline.errors import ItemError
from pipeline.schema import MediaItem, Probe, SamplePlan


def probe_part(media: MediaItem, probe: Probe) -> Probe:
    """What is known of the part of its file that `media` names, or `probe`, the file's, for all of it.

    The part has its own duration and number of frames. It may stop behind the end by max(2 frames, 5 % of the file's
    duration), as far as headers are wrong, and then stops at the end. Raises `ItemError` (stage `probe`):
    `no_such_part` for what starts or stops later, or when the header does not say how long the file is,
    `modality_mismatch` for a part of what has no duration.
    """
    if not media.is_part:
        return probe
    if probe.modality not in ("video", "audio"):
        raise ItemError(
            "probe", "modality_mismatch", f"{media.name}: the content is {probe.modality}, and has no parts"
        )
    start, stop = media.start_seconds or 0.0, media.stop_seconds
    end = probe.duration_seconds
    allowed = max(2 / probe.rate_fps if probe.rate_fps > 0 else 0.0, 0.05 * end)
    if start >= end or (stop is not None and stop > end + allowed):
        raise ItemError("probe", "no_such_part", f"{media.name}: it is {end:.3f} s long")
    duration = (end if stop is None else min(stop, end)) - start
    num_frames = probe.num_frames and max(1, min(probe.num_frames, math.ceil(duration * probe.rate_fps)))
    return replace(probe, duration_seconds=duration, num_frames=num_frames)


def part_plan(media: MediaItem, plan: SamplePlan) -> SamplePlan:
    """The times `plan` has from the start of the part, from the start of the file: what models are told, too.

    An answer then names times that the file has, and features that are kept under these times are of one prompt.
    """
    start = media.start_seconds or 0.0
    return plan if start == 0 else SamplePlan(pts_seconds=tuple(start + t for t in plan.pts_seconds))
