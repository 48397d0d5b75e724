"""A video stream's packets: all in memory, or read where they are needed, which an index or cues tell."""

from __future__ import annotations

import contextlib
import io
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from pipeline.media.packets import CUED_FORMAT, PacketFacts, PacketIndex
from pipeline.media.sniff import identify
from pipeline.media.streams import Orientation

VideoPacket: TypeAlias = "Packet[VideoStream]"  # not subscriptable at run time

# AVI stores no presentation times and libav numbers its packets in decode order; a program stream times some packets
# only, and libav's guesses for the others step back at group borders. Their times are right as a set, not one by one.
_CONTAINERS_WITHOUT_PTS = ("avi", "mpeg")
# Packets are read together up to this size, and over gaps (the sound between them) up to that.
_READ_BYTES = 4 * 2**20
_GAP_BYTES = 32 * 2**10


# Between cues at most so much is held, or else everything is decoded: encoders put keyframes closer.
_STRETCH_BYTES = 32 * 2**20
# A picture follows so many in decoding order, at most, that are shown after it (H.264 A.3.1 and HEVC A.4.1: the buffer
# of decoded pictures has room for 16; VP8, VP9 and AV1 have such pictures within one packet).
_MOST_REORDERED = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Packets that follow each other, from a keyframe on to where all that is shown up to the last of `wanted` is in.

    `wanted`, ascending pts, are those asked for from place `first` on. `packets(start, stop)` may read, and raises what
    the file raises.
    """

    first: int
    wanted: Sequence[int]
    index: PacketIndex
    packets: Callable[[int, int], Iterator[VideoPacket]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """A stream's packets in decode order, and what is needed to decode, time and turn its frames.

    `packets(start, stop)` gives them in order. `stretches(wanted)` gives what the frames at ascending pts are decoded
    from, None where that cannot be told. Of a file that is read by its cues `index` and `packets` are of the beginning
    only; `in_sequence()` is a clip that has all. These may read, and raise what the file raises.
    """

    context: VideoCodecContext
    index: PacketIndex
    packets: Callable[[int, int], Iterator[VideoPacket]]
    stretches: Callable[[Sequence[int]], Iterator[Stretch | None]]
    in_sequence: Callable[[], Clip]
    seconds_per_tick: float
    frame_seconds: float
    duration_seconds: float
    orientation: Orientation
    has_pts: bool


@contextmanager
def open_clip(file: BinaryIO, *, by_range: bool = False) -> Iterator[Clip]:
    """The video that `file` shows. With `by_range` no packet is read before it is asked for: of MP4, MOV and Matroska.

    Memory: the compressed stream, or with `by_range` 4 MB of it, of Matroska what lies between a cue and the last
    frame that is wanted before the next one, and 150 bytes a packet. Raises `ItemError` (stage `decode`):
    `unknown_format`, `no_video_stream`; `av.FFmpegError` for what cannot be opened.
    """
    format = identify(file, stage="decode", name="video").format
    is_cued = by_range and format == CUED_FORMAT
    source = _Holes(file) if by_range and not is_cued else None
    with ExitStack() as opened:
        container, stream = _open(opened, cast(BinaryIO, source or file), format)
        stream.thread_type = "NONE"
        stream.codec_context.thread_count = 1  # many processes decode at once
        if is_cued:
            packets = _beginning(container, stream)
        else:
            packets = _in_memory(container, stream) if source is None else _by_range(container, stream, source)
        rate = streams.frame_rate(stream)
        clip = Clip(
            context=stream.codec_context,
            index=packets.index,
            packets=packets.read,
            stretches=lambda wanted: iter([Stretch(first=0, wanted=wanted, index=clip.index, packets=clip.packets)]),
            in_sequence=lambda: clip,
            seconds_per_tick=float(stream.time_base or 0),
            frame_seconds=1 / rate if rate else 0.0,
            duration_seconds=streams.declared_duration(container, stream),
            orientation=streams.orientation(container, stream),
            has_pts=container.format.name not in _CONTAINERS_WITHOUT_PTS,
        )
        if is_cued:
            clip = replace(
                clip,
                stretches=lambda wanted: _from_cues(container, stream, wanted),
                in_sequence=lambda: _with_all(clip, _reread(opened, file, format)),
            )
        yield clip


def _open(opened: ExitStack, file: BinaryIO, format: str) -> tuple[InputContainer, VideoStream]:
    """The container, and the stream to show, alone."""
    container = opened.enter_context(streams.open_by_header(file, format, is_decoded=True))
    if container is None:
        container = opened.enter_context(streams.open_container(file, format))
    stream = streams.shown_stream(container)
    if stream is None:
        raise ItemError("decode", "no_video_stream", f"{container.format.name} without a video stream")
    for other in container.streams:
        if other.index != stream.index:
            other.discard = Discard.all
    return container, stream


def _with_all(clip: Clip, packets: _Packets) -> Clip:
    return replace(clip, index=packets.index, packets=packets.read)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packets:
    index: PacketIndex
    read: Callable[[int, int], Iterator[VideoPacket]]


def _in_memory(container: InputContainer, stream: VideoStream) -> _Packets:
    packets = list(_demuxed(container, stream))
    if packets and packets[-1].is_corrupt:  # only half there
        packets.pop()
    return _held(packets)


def _held(packets: list[VideoPacket]) -> _Packets:
    index = PacketIndex([_facts(packet) for packet in packets])
    return _Packets(index=index, read=lambda start, stop: iter(packets[start:stop]))


def _beginning(container: InputContainer, stream: VideoStream) -> _Packets:
    """The first packets, up to where none can come any more that is shown before the first of them."""
    return _held(list(itertools.islice(_demuxed(container, stream), _MOST_REORDERED + 1)))


def _from_cues(container: InputContainer, stream: VideoStream, wanted: Sequence[int]) -> Iterator[Stretch | None]:
    """A stretch for those of `wanted` that one cue is the last before. Of a file without cues libav makes its own, and
    reads all up to there."""
    container.seek(wanted[-1], stream=stream)
    cues = sorted(entry.timestamp for entry in stream.index_entries if entry.is_keyframe)
    first = 0
    for cue, group in itertools.groupby(wanted, key=lambda pts: bisect_right(cues, pts) - 1):
        here = list(group)
        packets = _stretch(container, stream, cues[cue], here[-1]) if cue >= 0 else None
        if packets is None or not packets[0].is_keyframe or packets[0].pts is None or packets[0].pts > here[0]:
            yield None
            return
        held = _held(packets)
        yield Stretch(first=first, wanted=here, index=held.index, packets=held.read)
        first += len(here)


def _stretch(container: InputContainer, stream: VideoStream, start: int, last: int) -> list[VideoPacket] | None:
    """The packets from the keyframe at `start` to where none can come any more that is shown up to `last`."""
    container.seek(start, stream=stream)
    packets: list[VideoPacket] = []
    later = num_bytes = 0
    for packet in _demuxed(container, stream):
        packets.append(packet)
        num_bytes += packet.size
        later += packet.pts is not None and packet.pts > last
        if later > _MOST_REORDERED:
            break
        if num_bytes > _STRETCH_BYTES:
            return None
    return packets or None


def _reread(opened: ExitStack, file: BinaryIO, format: str) -> _Packets:
    """All packets, none of them held: the file is gone over for its index, and once more for what is read."""
    facts: list[PacketFacts] = []
    is_whole = True
    for packet in _demuxed(*_open(opened, file, format)):
        facts.append(_facts(packet))
        is_whole = not packet.is_corrupt
    index = PacketIndex(facts if is_whole else facts[:-1])

    def read(start: int, stop: int) -> Iterator[VideoPacket]:
        return itertools.islice(_demuxed(*_open(opened, file, format)), start, stop)

    return _Packets(index=index, read=read)


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
