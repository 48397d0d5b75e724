"""Video to frames: exactly the frames that are on screen at the planned times."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import av
import numpy as np
import numpy.typing as npt
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter

from pipeline.errors import ItemError
from pipeline.media.av1 import Av1Sequence, is_unreferenced, read_sequence
from pipeline.media.clip import Clip, Stretch, VideoPacket, open_clip
from pipeline.media.packets import PacketIndex, Run
from pipeline.media.resize import Resample, resize_frames
from pipeline.media.streams import Orientation
from pipeline.schema import Frames, SamplePlan

_TOLERANCE_SECONDS = 1e-6
# Whose decoders know from a picture's header that none refers to it, and are exact about it: on every clip of the tests
# the pictures that were decoded were the same as without.
_SKIPS_NONREF = frozenset({"h264", "hevc"})


def decode_video(
    file: BinaryIO,
    plan: SamplePlan,
    size: tuple[int, int] | None,
    resample: Resample = "bicubic",
    *,
    by_range: bool = False,
    at_keyframes: bool = False,
) -> Frames:
    """The frames shown at the planned times, upright RGB, each resized to `size` = (height, width) as it comes.

    The frame shown at t is the last whose time since the first shown frame is <= t + 1 µs; times come from the
    container, never from a frame's number. Memory: the result, a few frames at the original size, and the compressed
    stream, or with `by_range` (of MP4, MOV and Matroska: see `open_clip`) a part of it: then nothing of `file` is read
    but its index or cues, and what the frames need, in order. With `at_keyframes` the keyframes before the planned
    times are shown instead, where the container's times can be relied on.

    Raises `ItemError` (stage `decode`): `corrupt` when no frame comes out, `truncated` when the stream ends more than
    max(2 frames, 5 % of its duration) before the last planned time, `unknown_format`, `no_video_stream`.
    """
    try:
        with open_clip(file, by_range=by_range) as clip:
            return _decode_clip(clip, _Wish(plan=plan, size=size, resample=resample, at_keyframes=at_keyframes))
    except av.FFmpegError as error:
        raise ItemError("decode", "corrupt", f"the video cannot be opened: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wish:
    """What is to be shown; `size` is (height, width), None for that of the frames."""

    plan: SamplePlan
    size: tuple[int, int] | None
    resample: Resample
    at_keyframes: bool

    def ticks(self, clip: Clip, first_pts: int) -> list[int]:
        """The planned times as pts, ascending."""
        times = (math.floor((t + _TOLERANCE_SECONDS) / clip.seconds_per_tick) for t in self.plan.pts_seconds)
        return [first_pts + ticks for ticks in times]

    def shown(self, clip: Clip, index: PacketIndex, wanted: Sequence[int]) -> Sequence[int]:
        """Those of which the frames are shown in place of the ones at `wanted`."""
        return index.at_keyframes(wanted) if self.at_keyframes and clip.has_pts else wanted

    def canvas(self, clip: Clip, frame: VideoFrame) -> _Canvas:
        """An empty one, of the size of `frame` where none is wished."""
        width, height = clip.orientation.size(frame.width, frame.height)
        return _Canvas(
            pixels=np.empty((len(self.plan), *(self.size or (height, width)), 3), np.uint8),
            shown_pts=[0] * len(self.plan),
            orientation=clip.orientation,
            reformatter=VideoReformatter(),
            resample=self.resample,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """`frame` is what is on screen for the targets from `start` up to, not including, `stop`."""

    start: int
    stop: int
    pts: int
    frame: VideoFrame


@dataclass(frozen=True, kw_only=True, slots=True)
class _Canvas:
    """The result being filled: `pixels` (T, H, W, 3), and the pts of the frame shown in each of the T places."""

    pixels: npt.NDArray[np.uint8]
    shown_pts: list[int]
    orientation: Orientation
    reformatter: VideoReformatter
    resample: Resample

    def put(self, pts: int, frame: VideoFrame, places: Sequence[int]) -> None:
        """Show a frame in some places."""
        if not places:
            return
        rgb = self.reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
        upright = self.orientation.apply(rgb.astype(np.uint8, copy=False))[np.newaxis]  # (1, H, W, 3)
        height, width = self.pixels.shape[1:3]
        self.pixels[list(places)] = resize_frames(upright, (height, width), self.resample)
        for place in places:
            self.shown_pts[place] = pts


def _decode_clip(clip: Clip, wish: _Wish) -> Frames:
    first_pts, canvas, index = _decode_by_keyframe(clip, wish) or _decode_in_sequence(clip.in_sequence(), wish)
    _check_reached(clip, index, wish.plan, wish.shown(clip, index, wish.ticks(clip, first_pts)), canvas.shown_pts)
    times = tuple((pts - first_pts) * clip.seconds_per_tick for pts in canvas.shown_pts)
    return Frames(pixels=canvas.pixels, pts_seconds=times)


def _decode_in_sequence(clip: Clip, wish: _Wish) -> tuple[int, _Canvas, PacketIndex]:
    """Every frame up to the last that is wanted; the pts of the first, what is shown, and all packets."""
    frames = _frames_in_sequence(clip)
    first = next(frames, None)
    if first is None:
        raise ItemError("decode", "corrupt", f"none of {len(clip.index.packets)} packets decodes to a frame")
    canvas = wish.canvas(clip, first[1])
    wanted = wish.shown(clip, clip.index, wish.ticks(clip, first[0]))
    for answer in _answers(itertools.chain([first], frames), wanted):
        canvas.put(answer.pts, answer.frame, range(answer.start, answer.stop))
    return first[0], canvas, clip.index


def _decode_by_keyframe(clip: Clip, wish: _Wish) -> tuple[int, _Canvas, PacketIndex] | None:
    """Only what is between each target's keyframe and the target. None when that cannot be shown to be exact.

    It is exact when every target is answered by the very packet that the container's times name, and the first frame is
    the one that they name. A frame that does not come out (hidden, damaged, not decodable from a keyframe that is none)
    leaves it to decoding in sequence.
    """
    first_pts = clip.index.first_shown_pts() if clip.has_pts else None
    if first_pts is None:
        return None
    canvas: _Canvas | None = None
    indexes: list[PacketIndex] = []
    for stretch in clip.stretches([first_pts, *wish.ticks(clip, first_pts)]):
        if stretch is None:
            return None
        runs = stretch.index.runs(wish.shown(clip, stretch.index, stretch.wanted))
        if runs is None:
            return None
        indexes.append(stretch.index)
        for run in runs:
            missing = dict(run.positions)
            for frame in _decode_run(clip.context, stretch, run):
                if frame.pts is None or frame.pts not in missing:
                    continue
                places = [stretch.first + place for place in missing.pop(frame.pts)]
                if frame.is_corrupt:
                    return None
                canvas = canvas or wish.canvas(clip, frame)
                # The first of them is the first frame's, which is looked at whether it is wanted or not.
                canvas.put(frame.pts, frame, [place - 1 for place in places if place])
            if missing:
                return None
    assert canvas is not None
    return first_pts, canvas, PacketIndex.merged(indexes)


def _decode_run(context: VideoCodecContext, stretch: Stretch, run: Run) -> Iterator[VideoFrame]:
    """Frames of the targets and of what they refer to, in the order of display.

    Pictures to which no other refers are not decoded, for codecs whose decoders can tell and leave them out exactly;
    AV1's decoder is not given them. VP9 has none: in what libvpx makes, looked at in four modes, each picture refreshes
    a reference.
    """
    context.flush_buffers()
    codec = context.codec.canonical_name
    sequence: Av1Sequence | None = None
    try:
        for number, packet in enumerate(stretch.packets(run.start, run.end + 1), run.start):
            is_target = number in run.targets
            if codec in _SKIPS_NONREF:
                context.skip_frame = "DEFAULT" if is_target else "NONREF"
            if codec == "av1" and number == run.start:
                sequence = read_sequence(memoryview(packet))
            if sequence is None or is_target or not is_unreferenced(memoryview(packet), sequence):
                yield from _fed(context, packet)
        yield from _fed(context, None)
    finally:
        context.skip_frame = "DEFAULT"


def _answers(frames: Iterable[tuple[int, VideoFrame]], wanted: Sequence[int]) -> Iterator[_Answer]:
    """Which of `frames` (in presentation order) is on screen at each of the ascending `wanted`.

    Frames that step back in time (joined transport streams) are passed over; behind the end the last frame stays.
    """
    position = 0
    held: tuple[int, VideoFrame] | None = None
    for pts, frame in frames:
        if held is not None:
            stop = bisect_left(wanted, pts, position)
            if stop > position:
                yield _Answer(start=position, stop=stop, pts=held[0], frame=held[1])
            position = stop
        if position == len(wanted):
            return
        if held is None or pts >= held[0]:
            held = (pts, frame)
    if held is not None:
        yield _Answer(start=position, stop=len(wanted), pts=held[0], frame=held[1])


def _frames_in_sequence(clip: Clip) -> Iterator[tuple[int, VideoFrame]]:
    """Every frame with its pts, decoded from the first packet on."""
    in_order = iter(clip.index.times)
    step = max(1, round(clip.frame_seconds / clip.seconds_per_tick))
    previous = -step
    for frame in _decode(clip.context, clip.packets(0, len(clip.index.packets))):
        pts = frame.pts if clip.has_pts else next(in_order, None)
        previous = previous + step if pts is None else pts
        yield previous, frame


def _decode(context: VideoCodecContext, packets: Iterable[VideoPacket]) -> Iterator[VideoFrame]:
    """Frames in presentation order, without those of packets that the decoder rejects."""
    context.flush_buffers()
    for packet in packets:
        yield from _fed(context, packet)
    yield from _fed(context, None)


def _fed(context: VideoCodecContext, packet: VideoPacket | None) -> list[VideoFrame]:
    """What comes out for a packet, or at the end for None."""
    try:
        return context.decode(packet)
    except av.FFmpegError:
        return []  # one damaged packet costs its own frames only; _check_reached says whether enough is left


def _check_reached(
    clip: Clip, index: PacketIndex, plan: SamplePlan, wanted: Sequence[int], shown: Sequence[int]
) -> None:
    """Raise when a frame would have to stay on screen for long after its time, because those behind it are missing."""
    times = index.times
    allowed = max(2 * clip.frame_seconds, 0.05 * clip.duration_seconds)
    for seconds, target, pts in zip(plan.pts_seconds, wanted, shown, strict=True):
        after = bisect_right(times, pts)
        ends = times[after] if after < len(times) else pts + _last_frame_ticks(clip, index, pts)
        missing = (target - ends) * clip.seconds_per_tick
        if missing > allowed:
            raise ItemError(
                "decode",
                "truncated",
                f"nothing to show at {seconds:.3f} s: the frame before it ended {missing:.3f} s earlier",
            )


def _last_frame_ticks(clip: Clip, index: PacketIndex, pts: int) -> float:
    stated = max((packet.duration for packet in index.packets if packet.pts == pts), default=0)
    return max(stated, clip.frame_seconds / clip.seconds_per_tick)
