"""Video to frames: exactly the frames that are on screen at the planned times."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from pipeline.errors import ItemError
from pipeline.media import streams
from pipeline.media.resize import Resample, resize_frames
from pipeline.media.sniff import identify
from pipeline.media.streams import Orientation
from pipeline.schema import Frames, SamplePlan

_TOLERANCE_SECONDS = 1e-6
# AVI stores no presentation times and libav numbers its packets in decode order; a program stream times some packets
# only, and libav's guesses for the others step back at group borders. Their times are right as a set, not one by one.
_CONTAINERS_WITHOUT_PTS = ("avi", "mpeg")


def decode_video(
    file: BinaryIO, plan: SamplePlan, size: tuple[int, int] | None, resample: Resample = "bicubic"
) -> Frames:
    """The frames shown at the planned times, upright RGB, each resized to `size` = (height, width) as it comes.

    The frame shown at t is the last whose time since the first shown frame is <= t + 1 µs; times come from the
    container, never from an index. Memory: the compressed stream, the result, and a few frames at the original size.
    Raises `ItemError` (stage `decode`): `corrupt` when no frame comes out, `truncated` when the stream ends more than
    max(2 frames, 5 % of its duration) before the last planned time, `unknown_format`, `no_video_stream`.
    """
    signature = identify(file, stage="decode", name="video")
    try:
        with streams.open_container(file, signature.format) as container:
            clip = _read_clip(container)
            return _decode_clip(clip, plan, size, resample)
    except av.FFmpegError as error:
        raise ItemError("decode", "corrupt", f"{signature.format}: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Clip:
    """A stream read into memory: its packets in decode order and what is needed to time and turn its frames."""

    context: VideoCodecContext
    packets: list[Packet[VideoStream]]
    seconds_per_tick: float
    frame_seconds: float
    duration_seconds: float
    orientation: Orientation
    has_pts: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Targets that one keyframe serves: packets `start` to `end`, and the pts that must answer from `position` on."""

    start: int
    end: int
    position: int
    expected: tuple[int, ...]


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

    def put(self, answer: _Answer, position: int = 0) -> None:
        """Show a frame where it answers, counted from `position`."""
        rgb = self.reformatter.reformat(answer.frame, format="rgb24", threads=1).to_ndarray()
        upright = self.orientation.apply(rgb.astype(np.uint8, copy=False))[np.newaxis]  # (1, H, W, 3)
        height, width = self.pixels.shape[1:3]
        places = slice(position + answer.start, position + answer.stop)
        self.pixels[places] = resize_frames(upright, (height, width), self.resample)
        self.shown_pts[places] = [answer.pts] * (answer.stop - answer.start)


def _read_clip(container: InputContainer) -> _Clip:
    stream = streams.shown_stream(container)
    if stream is None:
        raise ItemError("decode", "no_video_stream", f"{container.format.name} without a video stream")
    stream.thread_type = "NONE"
    stream.codec_context.thread_count = 1  # many processes decode at once
    rate = streams.frame_rate(stream)
    return _Clip(
        context=stream.codec_context,
        packets=_read_packets(container, stream),
        seconds_per_tick=float(stream.time_base or 0),
        frame_seconds=1 / rate if rate else 0.0,
        duration_seconds=streams.declared_duration(container, stream),
        orientation=streams.orientation(container, stream),
        has_pts=container.format.name not in _CONTAINERS_WITHOUT_PTS,
    )


def _read_packets(container: InputContainer, stream: VideoStream) -> list[Packet[VideoStream]]:
    """All packets in decode order, up to where the file breaks off, without a last one that is only half there."""
    packets: list[Packet[VideoStream]] = []
    # A file that breaks off: what came before is usable, and _check_reached says whether it is enough.
    with contextlib.suppress(av.FFmpegError):
        for packet in container.demux(stream):
            if packet.size:
                packets.append(packet)
    if packets and packets[-1].is_corrupt:
        packets.pop()
    return packets


def _decode_clip(clip: _Clip, plan: SamplePlan, size: tuple[int, int] | None, resample: Resample) -> Frames:
    first = next(_frames_in_sequence(clip), None)
    if first is None:
        raise ItemError("decode", "corrupt", f"none of {len(clip.packets)} packets decodes to a frame")
    first_pts = first[0]
    wanted = [first_pts + math.floor((t + _TOLERANCE_SECONDS) / clip.seconds_per_tick) for t in plan.pts_seconds]
    canvas = _new_canvas(clip, len(wanted), size or _presented_size(clip, first[1]), resample)
    if not _decode_by_keyframe(clip, wanted, canvas):
        for answer in _answers(_frames_in_sequence(clip), wanted):
            canvas.put(answer)
    _check_reached(clip, plan, wanted, canvas.shown_pts)
    shown = tuple((pts - first_pts) * clip.seconds_per_tick for pts in canvas.shown_pts)
    return Frames(pixels=canvas.pixels, pts_seconds=shown)


def _presented_size(clip: _Clip, frame: VideoFrame) -> tuple[int, int]:
    width, height = clip.orientation.size(frame.width, frame.height)
    return height, width


def _new_canvas(clip: _Clip, num_frames: int, size: tuple[int, int], resample: Resample) -> _Canvas:
    return _Canvas(
        pixels=np.empty((num_frames, *size, 3), np.uint8),
        shown_pts=[0] * num_frames,
        orientation=clip.orientation,
        reformatter=VideoReformatter(),
        resample=resample,
    )


def _decode_by_keyframe(clip: _Clip, wanted: list[int], canvas: _Canvas) -> bool:
    """Decode only from each target's keyframe to the target. False when that cannot be shown to be exact.

    It is exact when every target is answered by the very packet that the container's times name. A frame that does not
    come out (hidden, damaged, not decodable from a keyframe that is none) leaves it to decoding in sequence.
    """
    groups = _group_by_keyframe(clip, wanted)
    if groups is None:
        return False
    for group in groups:
        frames = _decode(clip.context, clip.packets[group.start : group.end + 1])
        timed = ((frame.pts, frame) for frame in frames if frame.pts is not None)
        num_answered = 0
        for answer in _answers(timed, group.expected):
            if answer.frame.is_corrupt or set(group.expected[answer.start : answer.stop]) != {answer.pts}:
                return False
            canvas.put(answer, group.position)
            num_answered = answer.stop
        if num_answered != len(group.expected):
            return False
    return True


def _group_by_keyframe(clip: _Clip, wanted: list[int]) -> list[_Group] | None:
    """Consecutive targets that share a keyframe, or None when the packets' times cannot be relied on."""
    shown = sorted(
        (packet.pts, i) for i, packet in enumerate(clip.packets) if packet.pts is not None and not packet.is_discard
    )
    times = [pts for pts, _ in shown]
    untimed = any(packet.pts is None for packet in clip.packets)
    if not clip.has_pts or untimed or len(set(times)) != len(times):
        return None
    keyframes = [i for i, packet in enumerate(clip.packets) if packet.is_keyframe]
    groups: list[_Group] = []
    for position, target in enumerate(wanted):
        nearest = bisect_right(times, target) - 1
        if nearest < 0:
            return None
        pts, index = shown[nearest]
        start = _keyframe_for(clip, keyframes, index, pts)
        if start is None:
            return None
        if groups and groups[-1].start == start:
            last = groups.pop()
            group = replace(last, end=max(last.end, index), expected=(*last.expected, pts))
        else:
            group = _Group(start=start, end=index, position=position, expected=(pts,))
        groups.append(group)
    return groups


def _keyframe_for(clip: _Clip, keyframes: list[int], index: int, pts: int) -> int | None:
    """The last keyframe decoded at or before packet `index` that is also shown at or before `pts`.

    Leading pictures of an open GOP come behind their keyframe and are shown before it: they refer to the one before.
    """
    for keyframe in reversed(keyframes[: bisect_right(keyframes, index)]):
        keyframe_pts = clip.packets[keyframe].pts
        if keyframe_pts is not None and keyframe_pts <= pts:
            return keyframe
    return None


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


def _frames_in_sequence(clip: _Clip) -> Iterator[tuple[int, VideoFrame]]:
    """Every frame with its pts, decoded from the first packet on."""
    in_order = iter(sorted(packet.pts for packet in clip.packets if packet.pts is not None))
    step = max(1, round(clip.frame_seconds / clip.seconds_per_tick))
    previous = -step
    for frame in _decode(clip.context, clip.packets):
        pts = frame.pts if clip.has_pts else next(in_order, None)
        previous = previous + step if pts is None else pts
        yield previous, frame


def _decode(context: VideoCodecContext, packets: Iterable[Packet[VideoStream]]) -> Iterator[VideoFrame]:
    """Frames in presentation order, without those of packets that the decoder rejects."""
    context.flush_buffers()
    for packet in (*packets, None):
        try:
            frames = context.decode(packet)
        except av.FFmpegError:
            continue  # one damaged packet costs its own frames only; _check_reached says whether enough is left
        yield from frames


def _check_reached(clip: _Clip, plan: SamplePlan, wanted: list[int], shown: list[int]) -> None:
    """Raise when a frame would have to stay on screen for long after its time, because those behind it are missing."""
    times = sorted(packet.pts for packet in clip.packets if packet.pts is not None)
    allowed = max(2 * clip.frame_seconds, 0.05 * clip.duration_seconds)
    for seconds, target, pts in zip(plan.pts_seconds, wanted, shown, strict=True):
        after = bisect_right(times, pts)
        ends = times[after] if after < len(times) else pts + _last_frame_ticks(clip, pts)
        missing = (target - ends) * clip.seconds_per_tick
        if missing > allowed:
            raise ItemError(
                "decode",
                "truncated",
                f"nothing to show at {seconds:.3f} s: the frame before it ended {missing:.3f} s earlier",
            )


def _last_frame_ticks(clip: _Clip, pts: int) -> float:
    stated = max((packet.duration or 0 for packet in clip.packets if packet.pts == pts), default=0)
    return max(stated, clip.frame_seconds / clip.seconds_per_tick)
