"""A container opened with PyAV: the stream to show, which way up, how long and how fast, and the sound to hear."""

from __future__ import annotations

import contextlib
import io
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, BinaryIO

import av
import numpy as np
import numpy.typing as npt
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.stream import VideoStream

from pipeline.errors import HeadraceError
from pipeline.media import h264
from pipeline.media.packets import CUED_FORMAT, INDEXED_FORMAT

_CONTAINERS_WITH_A_MATRIX = ("mov", "matroska")
# libav decodes up to eighteen pictures to find out what a stream is: 10 ms of 720p H.264, 13 of VP9, each time a file
# is opened. These decoders read it in the header, and no packet beyond the first is looked at: 0.1 to 0.6 ms.
_BY_HEADER = {"codec_whitelist": "h264,hevc,libdav1d", "skip_frame": "all", "probesize": "32"}
HIGHEST_RATE_HZ = 1_536_000  # of sound; what is meant for people has an eighth of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Orientation:
    """Which of the eight ways a picture lies: transpose first, then mirror."""

    transposed: bool = False
    mirrored_x: bool = False
    mirrored_y: bool = False

    def size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) as presented."""
        return (height, width) if self.transposed else (width, height)

    def apply(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Turn `(H, W, C)` upright: a view, except where nothing is to be done."""
        if self.transposed:
            pixels = pixels.swapaxes(0, 1)
        if self.mirrored_x:
            pixels = pixels[:, ::-1]
        return pixels[::-1] if self.mirrored_y else pixels


class _Reader:
    """A file whose failure is kept: PyAV drops some of the errors raised in its reads, and libav sees a short file."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell = file.seek, file.tell
        self.failure: HeadraceError | OSError | None = None
        self._file = file

    def read(self, size: int) -> bytes:
        """The next bytes; nothing, for ever, once a read has failed."""
        if self.failure is not None:
            return b""
        try:
            return self._file.read(size)
        except (HeadraceError, OSError) as error:
            self.failure = error
            return b""


@contextmanager
def open_container(
    file: BinaryIO, format: str, options: Mapping[str, str] = MappingProxyType({})
) -> Iterator[InputContainer]:
    """The container as demuxer `format` reads it; `file` stays open. Raises `av.FFmpegError`, and what `file` raises.

    The demuxer is always named: left to guess, libav takes text for playlists that name other files. `options` are
    libav's, for the demuxer and for the decoders that look at the first packets.
    """
    file.seek(0)
    reader = _Reader(file)
    try:
        with av.open(reader, mode="r", format=format, metadata_errors="replace", options=dict(options)) as container:
            yield container
    finally:
        if reader.failure is not None:
            raise reader.failure


@contextmanager
def open_by_header(file: BinaryIO, format: str, *, is_decoded: bool) -> Iterator[InputContainer | None]:
    """As `open_container`, without a picture being decoded; None where the header leaves something open.

    What is found is what decoding the first pictures would find: of H.264 and HEVC and AV1 in MP4 and MOV the size and
    the order of pictures are in the header. With `is_decoded`, when the pictures will say their size themselves, of VP9
    too.
    """
    if format in (INDEXED_FORMAT, CUED_FORMAT):
        with open_container(file, format, _BY_HEADER) as container:
            stream = shown_stream(container)
            if stream is not None and _is_told(container, stream, is_decoded):
                yield container
                return
    yield None


def _is_told(container: InputContainer, stream: VideoStream, is_decoded: bool) -> bool:
    context = stream.codec_context
    if not (stream.average_rate and stream.start_time is not None and declared_duration(container, stream)):
        return False
    codec = codec_name(stream)
    if codec == "vp9":
        return is_decoded
    if INDEXED_FORMAT not in container.format.name:
        return False
    if codec == "h264":
        sequence = _h264_sequence(stream)
        # Where the order is told the decoder keeps to it; where not, it finds it out, and loses pictures until it has.
        return (
            sequence is not None
            and sequence.num_reorder_frames is not None
            and (sequence.width, sequence.height) == (context.width, context.height)
        )
    return codec in ("hevc", "av1") and context.pix_fmt is not None


def shown_stream(container: InputContainer) -> VideoStream | None:
    """The largest video stream that is not cover art and that this build can decode, or None."""
    streams = [
        stream
        for stream in container.streams.video
        if not stream.disposition & Disposition.attached_pic and stream.codec_context is not None
    ]
    return max(streams, key=lambda s: s.codec_context.width * s.codec_context.height, default=None)


def heard_stream(container: InputContainer) -> AudioStream | None:
    """The first sound that is marked as the default, or else the first, of those that this build can decode."""
    streams = [stream for stream in container.streams.audio if stream.codec_context is not None]
    return next((s for s in streams if s.disposition & Disposition.default), streams[0] if streams else None)


def first_picture(container: InputContainer) -> Fraction | None:
    """When the video that is shown starts, in seconds of the container's clock; None where there is none, or no time.

    What starts before the clock's zero is there for the decoder.
    """
    stream = shown_stream(container)
    if stream is None or stream.start_time is None or stream.time_base is None:
        return None
    return max(Fraction(0), stream.start_time * stream.time_base)


def sound_duration(container: InputContainer, stream: AudioStream) -> float:
    """Seconds from the file's first picture or sample to the end of its sound by the header, 0 when it does not say."""
    base = stream.time_base or Fraction(0)
    start = (stream.start_time or 0) * base
    picture = first_picture(container)
    late = max(0.0, float(start - picture)) if picture is not None else 0.0
    if stream.duration:
        return late + max(0.0, float(stream.duration * base))
    tag = _tagged_seconds(stream)
    # Of a file with pictures, the header's duration may be theirs.
    end = tag if tag or picture is not None else (container.duration or 0) / av.time_base
    if "matroska" not in container.format.name:
        return late + end
    origin = start if picture is None else min(start, picture)
    return max(0.0, end - float(origin)) if end else 0.0


def _tagged_seconds(stream: AudioStream) -> float:
    """Matroska: where libav and mkvmerge wrote that a track ends, or 0."""
    tag = next((value for name, value in stream.metadata.items() if name.upper().split("-")[0] == "DURATION"), "")
    match = re.fullmatch(r"(\d{1,6}):(\d{2}):(\d{2}(?:\.\d{1,9})?)", tag)
    return 0.0 if match is None else int(match[1]) * 3600 + int(match[2]) * 60 + float(match[3])


def packets(container: InputContainer, stream: AudioStream) -> Iterator[Packet[AudioStream]]:
    """Of one stream that is opened, up to where the file breaks off: what came before is usable."""
    # IndexError: PyAV 18 fails so at the end of a transport stream in which another stream has begun on the way.
    with contextlib.suppress(av.FFmpegError, IndexError):
        for packet in container.demux(stream):
            if packet.size:
                yield packet


def reorder_depth(stream: VideoStream) -> int:
    """How many pictures a decoder holds back, because they are shown later."""
    told = _h264_sequence(stream)
    return max(0, stream.codec_context.reorder_depth, (told and told.num_reorder_frames) or 0)


def _h264_sequence(stream: VideoStream) -> h264.H264Sequence | None:
    if codec_name(stream) != "h264":
        return None
    return h264.read_sequence(bytes(stream.codec_context.extradata or b""))


def frame_rate(stream: VideoStream) -> float:
    """Average frames per second by the header, or libav's guess, or 0 when neither is known."""
    return float(stream.average_rate or stream.guessed_rate or 0)


def declared_duration(container: InputContainer, stream: VideoStream) -> float:
    """Seconds from the first frame to the end of the last by the header, or 0 when it does not say."""
    if stream.duration and stream.time_base:
        return max(0.0, float(stream.duration * stream.time_base))
    duration = (container.duration or 0) / av.time_base
    # A Matroska header holds the end of the last frame on the file's own clock, which need not start at 0.
    if "matroska" in container.format.name and stream.start_time and stream.time_base:
        duration -= float(stream.start_time * stream.time_base)
    return max(0.0, duration)


def orientation(container: InputContainer, stream: VideoStream) -> Orientation:
    """How the container asks for the pictures to be turned.

    PyAV 18 shows the display matrix on decoded frames only. So that a header is enough, the stream's parameters are
    written as an empty MP4 in memory (0.1-0.3 ms measured) and read from its track header. What MP4 and MOV cannot hold
    (VP8) and turns announced inside the bitstream are not seen, here and in decode alike.
    """
    if not any(name in container.format.name for name in _CONTAINERS_WITH_A_MATRIX):
        return Orientation()
    for format in ("mp4", "mov"):
        try:
            return _orientation_of(_track_header_matrix(stream, format))
        except (av.FFmpegError, ValueError):
            continue
    return Orientation()


def _track_header_matrix(stream: VideoStream, format: str) -> tuple[int, ...]:
    header = io.BytesIO()
    with av.open(header, mode="w", format=format, options={"movflags": "empty_moov"}) as output:
        output.add_stream_from_template(stream, opaque=True)
        output.start_encoding()
    data = header.getvalue()
    # ISO/IEC 14496-12, 8.3.2: the matrix lies 40 bytes into the track header, whose version is 0 here.
    return struct.unpack_from(">9i", data, data.index(b"tkhd") + 4 + 40)


def _orientation_of(matrix: tuple[int, ...]) -> Orientation:
    """x' = a·x + c·y, y' = b·x + d·y (ISO/IEC 14496-12, 6.2.2); angles between quarters go to the nearer one."""
    a, b, _, c, d, *_ = matrix
    if abs(b) + abs(c) > abs(a) + abs(d):
        return Orientation(transposed=True, mirrored_x=c < 0, mirrored_y=b < 0)
    return Orientation(mirrored_x=a < 0, mirrored_y=d < 0)


def codec_name(stream: VideoStream | AudioStream) -> str:
    """The codec's canonical name: `h264`, `hevc`, `vp9`, `aac`."""
    context: Any = stream.codec_context
    return str(context.codec.canonical_name)
