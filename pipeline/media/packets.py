"""Which compressed packets of a video its planned frames need, before any is decoded. Pure."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

INDEXED_FORMAT = "mov"  # whose header says of each packet when it is shown and where it lies
CUED_FORMAT = "matroska"  # whose cues say when keyframes are shown and where they lie
# By range; not MPEG-TS, of which nothing but reading all of it shows that its clock does not step or start anew.
RANGED_FORMATS = frozenset({INDEXED_FORMAT, CUED_FORMAT})


@dataclass(frozen=True, kw_only=True, slots=True)
class PacketFacts:
    """What a container says of one packet; `pts` is in the stream's ticks, None where the container has no time."""

    pts: int | None
    num_bytes: int
    is_keyframe: bool
    is_discarded: bool  # decoded and not shown, by an edit list
    dts: int | None = None
    duration: int = 0
    file_offset: int | None = None


@dataclass(kw_only=True, slots=True)
class Run:
    """Packets `start` to `end`, both included and beginning with a keyframe, and what they are decoded for.

    `targets` are packets whose frames are wanted; `positions`: pts of a frame → the places of the plan that it answers.
    """

    start: int
    end: int = -1
    targets: set[int] = field(default_factory=set)
    positions: dict[int, list[int]] = field(default_factory=dict)

    def add(self, packet: int, pts: int, position: int) -> None:
        """Have the frame of `packet`, shown from `pts` on, answer at `position`."""
        self.end = max(self.end, packet)
        self.targets.add(packet)
        self.positions.setdefault(pts, []).append(position)


@dataclass(frozen=True, slots=True)
class PacketIndex:
    """A stream's packets in decode order."""

    packets: Sequence[PacketFacts]
    times: Sequence[int] = field(init=False)  # of all packets, ascending
    _shown: Sequence[tuple[int, int]] = field(init=False)  # (pts, packet), ascending
    _keyframes: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        packets = self.packets
        set_field = object.__setattr__
        set_field(self, "times", sorted(packet.pts for packet in packets if packet.pts is not None))
        shown = ((packet.pts, i) for i, packet in enumerate(packets) if packet.pts is not None)
        set_field(self, "_shown", sorted((pts, i) for pts, i in shown if not packets[i].is_discarded))
        set_field(self, "_keyframes", [i for i, packet in enumerate(packets) if packet.is_keyframe])

    @classmethod
    def merged(cls, indexes: Sequence[PacketIndex]) -> PacketIndex:
        """Of stretches of one stream, in order; what several have is in it once."""
        if len(indexes) == 1:
            return indexes[0]
        return cls(list({packet.pts: packet for index in indexes for packet in index.packets}.values()))

    def first_shown_pts(self) -> int | None:
        """Of the frame that is shown first, or None where only a decoder can tell.

        That is where the stream does not begin with a keyframe that is shown before all others: pictures ahead of it
        may or may not come out.
        """
        if not self.packets or not self._shown or not self.packets[0].is_keyframe:
            return None
        first = self.packets[0]
        if first.is_discarded:
            return self._shown[0][0]
        return first.pts if first.pts == self._shown[0][0] else None

    def runs(self, wanted: Sequence[int]) -> list[Run] | None:
        """What to decode for the frames on screen at each of the ascending pts `wanted`, in the order of the file.

        None when the packets' times cannot be relied on: some have none, or two have the same.
        """
        if not self._is_timed():
            return None
        runs: list[Run] = []
        for position, target in enumerate(wanted):
            nearest = bisect_right(self._shown, (target, len(self.packets))) - 1
            if nearest < 0:
                return None
            pts, packet = self._shown[nearest]
            start = self._keyframe_for(packet, pts)
            if start is None:
                return None
            # A keyframe that an open GOP before it has reached already: decoding goes on from there.
            if not runs or start > runs[-1].end:
                runs.append(Run(start=start))
            runs[-1].add(packet, pts, position)
        return runs

    def at_keyframes(self, wanted: Sequence[int]) -> list[int]:
        """For each of `wanted` the pts of the keyframe from which it is decoded; itself where none is shown, or the
        packets' times cannot be relied on."""
        return [self._keyframe_pts(target) for target in wanted] if self._is_timed() else list(wanted)

    def _is_timed(self) -> bool:
        untimed = len(self.times) < len(self.packets)
        return not untimed and all(a[0] != b[0] for a, b in itertools.pairwise(self._shown))

    def _keyframe_pts(self, target: int) -> int:
        nearest = bisect_right(self._shown, (target, len(self.packets))) - 1
        if nearest < 0:
            return target
        pts, packet = self._shown[nearest]
        start = self._keyframe_for(packet, pts)
        keyframe = None if start is None else self.packets[start]
        return target if keyframe is None or keyframe.is_discarded or keyframe.pts is None else keyframe.pts

    def reads(self, start: int, stop: int, most_bytes: int, gap_bytes: int) -> Iterator[tuple[int, int]]:
        """Packets `start` up to `stop` as (first, end) of those that are read from the file together, in order.

        A read spans at most `most_bytes`, where a packet alone does not, and gaps of at most `gap_bytes`.
        """
        first = start
        for number in range(start + 1, stop):
            packet, before = self.packets[number], self.packets[number - 1]
            gap = (packet.file_offset or 0) - (before.file_offset or 0) - before.num_bytes
            if not 0 <= gap <= gap_bytes or self.end_of(number) - (self.packets[first].file_offset or 0) > most_bytes:
                yield first, number
                first = number
        if first < stop:
            yield first, stop

    def end_of(self, packet: int) -> int:
        """Where in the file a packet ends."""
        last = self.packets[packet]
        return (last.file_offset or 0) + last.num_bytes

    def num_bytes(self, runs: Sequence[Run]) -> int:
        """Of the packets that are fed to the decoder."""
        return sum(packet.num_bytes for run in runs for packet in self.packets[run.start : run.end + 1])

    def _keyframe_for(self, packet: int, pts: int) -> int | None:
        """The last keyframe decoded at or before `packet` that is also shown at or before `pts`.

        Leading pictures of an open GOP come behind their keyframe and are shown before it: they refer to the one
        before.
        """
        for place in range(bisect_right(self._keyframes, packet) - 1, -1, -1):
            keyframe = self._keyframes[place]
            keyframe_pts = self.packets[keyframe].pts
            if keyframe_pts is not None and keyframe_pts <= pts:
                return keyframe
        return None
