"""A video stream's packets: all in memory, or indexed first and then read where they are needed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import BinaryIO, TypeAlias, cast

import av
from av.container import InputContainer
from av.packet import Packet
from av.stream import Discard
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream

from pipeline.errors import ItemError
from pipeline.media import streams
from pipeline.media.packets import PacketFacts, PacketIndex
from pipeline.media.sniff import identify
from pipeline.media.streams import Orientation

VideoPacket: TypeAlias = "Packet[VideoStream]"  # not subscriptable at run time

# AVI stores no presentation times and libav numbers its packets in decode order; a program stream times some packets
# only, and libav's guesses for the others step back at group borders. Their times are right as a set, not one by one.
_CONTAINERS_WITHOUT_PTS = ("avi", "mpeg")
# Packets are read together up to this size, and over gaps (the sound between them) up to that.
_READ_BYTES = 4 * 2**20
_GAP_BYTES = 32 * 2**10


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """A stream's packets in decode order, and what is needed to decode, time and turn its frames.

    `packets(start, stop)` gives them in order; it may read, and raises what the file raises.
    """

    context: VideoCodecContext
    index: PacketIndex
    packets: Callable[[int, int], Iterator[VideoPacket]]
    seconds_per_tick: float
    frame_seconds: float
    duration_seconds: float
    orientation: Orientation
    has_pts: bool


@contextmanager
def open_clip(file: BinaryIO, *, by_range: bool = False) -> Iterator[Clip]:
    """The video that `file` shows. With `by_range` no packet is read before it is asked for: an MP4 or MOV only.

    Memory: the compressed stream, or with `by_range` 4 MB of it and 150 bytes a packet. Raises `ItemError` (stage
    `decode`): `unknown_format`, `no_video_stream`; `av.FFmpegError` for what cannot be opened.
    """
    format = identify(file, stage="decode", name="video").format
    source = _Holes(file) if by_range else None
    with streams.open_container(cast(BinaryIO, source or file), format) as container:
        stream = streams.shown_stream(container)
        if stream is None:
            raise ItemError("decode", "no_video_stream", f"{container.format.name} without a video stream")
        for other in container.streams:
            if other.index != stream.index:
                other.discard = Discard.all
        stream.thread_type = "NONE"
        stream.codec_context.thread_count = 1  # many processes decode at once
        packets = _in_memory(container, stream) if source is None else _by_range(container, stream, source)
        rate = streams.frame_rate(stream)
        yield Clip(
            context=stream.codec_context,
            index=packets.index,
            packets=packets.read,
            seconds_per_tick=float(stream.time_base or 0),
            frame_seconds=1 / rate if rate else 0.0,
            duration_seconds=streams.declared_duration(container, stream),
            orientation=streams.orientation(container, stream),
            has_pts=container.format.name not in _CONTAINERS_WITHOUT_PTS,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packets:
    index: PacketIndex
    read: Callable[[int, int], Iterator[VideoPacket]]


def _in_memory(container: InputContainer, stream: VideoStream) -> _Packets:
    packets = list(_demuxed(container, stream))
    if packets and packets[-1].is_corrupt:  # only half there
        packets.pop()
    index = PacketIndex([_facts(packet) for packet in packets])
    return _Packets(index=index, read=lambda start, stop: iter(packets[start:stop]))


def _by_range(container: InputContainer, stream: VideoStream, source: _Holes) -> _Packets:
    facts: list[PacketFacts] = []
    extras: dict[int, VideoPacket] = {}
    with source.without_content():
        for packet in _demuxed(container, stream):
            if packet.has_sidedata("new_extradata"):
                extras[len(facts)] = packet
            facts.append(_facts(packet))
    # libav looks for keyframes in the zeros; the file's own table of them is right.
    keyframes = {entry.pos for entry in stream.index_entries if entry.is_keyframe}
    facts = [replace(each, is_keyframe=each.file_offset in keyframes) for each in facts]
    # What the index promises and the file does not hold.
    while facts and (facts[-1].file_offset or 0) + facts[-1].num_bytes > source.num_bytes:
        facts.pop()
    index = PacketIndex(facts)

    def read(start: int, stop: int) -> Iterator[VideoPacket]:
        for first, end in index.reads(start, stop, _READ_BYTES, _GAP_BYTES):
            begin = index.packets[first].file_offset or 0
            data = source.read_at(begin, index.end_of(end - 1) - begin)
            for number in range(first, end):
                packet = _packet(index.packets[number], data, begin, stream)
                if number in extras:
                    packet.set_sidedata(extras[number].get_sidedata("new_extradata"))
                yield packet

    return _Packets(index=index, read=read)


def _demuxed(container: InputContainer, stream: VideoStream) -> Iterator[VideoPacket]:
    """Up to where the file breaks off: what came before is usable."""
    with contextlib.suppress(av.FFmpegError):
        for packet in container.demux(stream):
            if packet.size:
                yield packet


def _facts(packet: VideoPacket) -> PacketFacts:
    return PacketFacts(
        pts=packet.pts,
        dts=packet.dts,
        num_bytes=packet.size,
        is_keyframe=packet.is_keyframe,
        is_discarded=packet.is_discard,
        duration=packet.duration or 0,
        file_offset=packet.pos,
    )


def _packet(facts: PacketFacts, data: bytes, begin: int, stream: VideoStream) -> VideoPacket:
    offset = (facts.file_offset or 0) - begin
    packet = cast("VideoPacket", Packet(data[offset : offset + facts.num_bytes]))
    packet.pts, packet.dts, packet.duration = facts.pts, facts.dts, facts.duration
    packet.is_keyframe = facts.is_keyframe
    assert stream.time_base is not None
    packet.time_base = stream.time_base
    return packet


class _Holes:
    """A file of boxes (ISO/IEC 14496-12) whose media data can be read as zeros, so that a demuxer can go over all
    packets without a byte of them being fetched."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._at = 0
        self._hidden = False
        self._looked_at: list[tuple[int, bytes]] = []
        self.num_bytes = file.seek(0, io.SEEK_END)
        self._content = list(_media_data(file, self.num_bytes))

    @contextmanager
    def without_content(self) -> Iterator[None]:
        """While it is entered, media data are zeros. Before, libav may have looked at the first packets."""
        self._hidden = True
        yield
        self._hidden = False

    def read_at(self, offset: int, size: int) -> bytes:
        """Bytes of the file itself, but for what was read when it was opened."""
        for start, data in self._looked_at:
            if start <= offset and offset + size <= start + len(data):
                return data[offset - start : offset - start + size]
        self._file.seek(offset)
        return self._file.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.num_bytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """May be shorter than asked for, as at the border of media data."""
        left = max(0, self.num_bytes - self._at)
        size = left if size is None or size < 0 else min(size, left)
        if self._hidden:
            for start, stop in self._content:
                if start <= self._at < stop:
                    data = bytes(min(size, stop - self._at))
                    break
                if self._at < start:
                    data = self.read_at(self._at, min(size, start - self._at))
                    break
            else:
                data = self.read_at(self._at, size)
        else:
            data = self.read_at(self._at, size)
            self._looked_at.append((self._at, data))
        self._at += len(data)
        return data


def _media_data(file: BinaryIO, num_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of the media data in each `mdat` box on the top level (ISO/IEC 14496-12, 4.2 and 8.1.1)."""
    at = 0
    while at + 8 <= num_bytes:
        file.seek(at)
        head = file.read(16)
        size, kind, header = int.from_bytes(head[:4], "big"), head[4:8], 8
        if size == 1:
            size, header = int.from_bytes(head[8:16], "big"), 16
        stop = num_bytes if size == 0 else min(num_bytes, at + size)
        if stop < at + header:
            return
        if kind == b"mdat":
            yield at + header, stop
        at = stop
