"""Sound to samples: one channel at the model's rate, on the container's own clock."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, BinaryIO, TypeAlias

import av
import numpy as np
import numpy.typing as npt
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.packet import Packet
from av.stream import Discard

from pipeline.errors import ItemError
from pipeline.media import streams
from pipeline.media.sniff import identify, stated_seconds

Samples: TypeAlias = npt.NDArray[np.float32]  # (N,)
AudioPacket: TypeAlias = "Packet[AudioStream]"  # not subscriptable at run time

LONGEST_SECONDS = 4 * 3600.0  # of sound that is held at once: 0.9 GB at 16 kHz

# libswresample's Kaiser window over 128 taps. From 44.1, 48 and 192 kHz to 16 kHz, in tones: flat (0.05 dB) up to 0.9
# of the new Nyquist frequency, -6 dB at 0.95, -69 dB at 0.99, and of what lies 3 % above it or more -95 dB is left. Its
# own default, 32 taps at 0.97, leaves -22 dB of what lies 5 % above, and takes 0.7 times as long.
_RESAMPLING = {"filter_size": "128", "cutoff": "0.95"}
_FILTER_SAMPLES = 128  # of the slower of the two rates
_BLOCK_SAMPLES = 65_536
# Containers with coarse clocks (Matroska, FLV: 1 ms) time packets that follow each other a little apart. The shortest
# packet of a usual codec that can be missing lasts as long.
_JITTER_SECONDS = Fraction(1, 100)
# Where decoding can begin at any packet with the very samples of decoding everything: codecs whose packets stand alone,
# in containers whose times count samples. Others carry state on, and are decoded from their start: AAC, begun 1 s
# earlier, was off by 0.24 on noise, for it makes some of that by a generator that runs through the whole stream.
_SEEKABLE = {"wav": ("pcm_",), "flac": ("flac",)}
_SEEK_EARLIER_SECONDS = 1
_LOUDEST = 2.0**20  # of full scale; sums of larger numbers could overflow
_MOST_PLANES = 7  # PyAV 18 counts planes up to a null pointer, which is not there behind the eighth
_KNOWN_FORMATS = frozenset({"u8", "s16", "s32", "flt", "dbl"})  # packed, or planar with a "p" behind
_FULL_SCALE = {np.dtype(np.int16): 2.0**15, np.dtype(np.int32): 2.0**31}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sound:
    """One channel; sample n is what is heard at `start_seconds` + n / `rate_hz`, on the clock of the whole sound."""

    samples: Samples  # (N,)
    rate_hz: int
    start_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.samples.dtype != np.float32 or self.samples.ndim != 1 or self.rate_hz <= 0:
            raise ValueError(
                f"a sound is float32 (N,), got {self.samples.dtype} {self.samples.shape} {self.rate_hz = }"
            )

    def __repr__(self) -> str:
        return f"Sound(samples={self.samples.size}, rate_hz={self.rate_hz}, start_seconds={self.start_seconds})"

    @property
    def duration_seconds(self) -> float:
        """Of the samples that are there."""
        return self.samples.size / self.rate_hz


def decode_audio(
    file: BinaryIO,
    *,
    rate_hz: int,
    start_seconds: float = 0.0,
    stop_seconds: float | None = None,
    longest_seconds: float = LONGEST_SECONDS,
) -> Sound:
    """The sound of `file`, or its part from `start_seconds` to `stop_seconds`, as one channel at `rate_hz`.

    Time 0 is where the file's first picture or sample is presented: sound that comes in later has silence before it, as
    have gaps in the container's times. Where those are continuous, samples are counted and not timed. What encoders add
    (priming, padding) is cut as the container says. Channels are averaged, each with the same weight, whatever its
    place: as librosa does, with which models were trained. Resampled by libswresample; silence lies around the sound.
    A part has the very samples that the whole sound has there: of round(start x rate) up to round(stop x rate), or
    where the sound ends. Full scale is -1 to 1; floating-point samples may pass it.

    Memory: twice the result, and some blocks at the source's rate. Raises `ItemError` (stage `decode`): `corrupt` when
    nothing decodes, or more than max(2, 5 %) of the packets do not; `truncated` when the sound ends more than max(2
    frames, 5 % of its duration) before what the header promises, or `stop_seconds`; `over_budget_duration` for more
    than `longest_seconds`; `unknown_format`, `no_audio_stream`.
    """
    blocks = sound_blocks(
        file, rate_hz=rate_hz, start_seconds=start_seconds, stop_seconds=stop_seconds, longest_seconds=longest_seconds
    )
    samples = np.concatenate([np.zeros(0, np.float32), *blocks])
    return Sound(samples=samples, rate_hz=rate_hz, start_seconds=round(start_seconds * rate_hz) / rate_hz)


def sound_blocks(
    file: BinaryIO,
    *,
    rate_hz: int,
    start_seconds: float = 0.0,
    stop_seconds: float | None = None,
    longest_seconds: float = LONGEST_SECONDS,
) -> Iterator[Samples]:
    """The samples of `decode_audio` in pieces, as they are decoded; it raises what that raises, then at the end too."""
    if start_seconds < 0 or (stop_seconds is not None and stop_seconds <= start_seconds):
        raise ValueError(f"a part starts at 0 or later and stops behind, got {start_seconds = }, {stop_seconds = }")
    try:
        with _open_track(file, longest_seconds) as track:
            yield from _part(track, rate_hz, start_seconds, stop_seconds)
    except av.FFmpegError as error:
        raise ItemError("decode", "corrupt", f"the sound cannot be opened: {error}") from error


def chunks(duration_seconds: float, *, seconds: float, overlap_seconds: float = 0.0) -> list[tuple[float, float]]:
    """(start, stop) of the pieces of a sound: each `seconds` long but the last, and sharing `overlap_seconds`.

    The last is the first that reaches the end. Pure.
    """
    if not 0 <= overlap_seconds < seconds or duration_seconds <= 0:
        raise ValueError(f"chunks of {seconds} s with {overlap_seconds} s in common of a sound of {duration_seconds} s")
    step = seconds - overlap_seconds
    count = max(1, math.ceil((duration_seconds - overlap_seconds) / step))
    return [(k * step, min(k * step + seconds, duration_seconds)) for k in range(count)]


@dataclass(slots=True)
class _Feed:
    """Mutable: decodes one stream, and counts what it was fed."""

    container: InputContainer
    stream: AudioStream
    fed: int = 0
    rejected: int = 0
    frame_seconds: float = 0.0

    def frames(self) -> Iterator[AudioFrame]:
        """Those of all packets from here on, but of packets that the decoder rejects."""
        for packet in itertools.chain(streams.packets(self.container, self.stream), [None]):
            for frame in self._decoded(packet):
                if frame.samples and frame.sample_rate > 0:
                    self.frame_seconds = max(self.frame_seconds, frame.samples / frame.sample_rate)
                    yield frame

    def _decoded(self, packet: AudioPacket | None) -> list[AudioFrame]:
        self.fed += packet is not None
        try:
            return self.stream.codec_context.decode(packet)
        except av.FFmpegError:
            self.rejected += packet is not None
            return []


@dataclass(frozen=True, kw_only=True, slots=True)
class _Track:
    """A sound that has begun to decode. `origin` is time 0, in seconds of the container's clock; at most
    `longest_seconds` are taken of it, and as many passed over."""

    feed: _Feed
    format: str
    origin: Fraction
    rate_hz: int
    declared_seconds: float
    longest_seconds: float
    begun: Iterator[AudioFrame]

    @property
    def exact_end(self) -> int | None:
        """Where an edit list ends the sound, in samples from time 0."""
        stream = self.feed.stream
        if self.format != "mov" or not stream.duration or not stream.time_base:
            return None
        end = ((stream.start_time or 0) + stream.duration) * stream.time_base
        return round((end - self.origin) * self.rate_hz)

    def frames_from(self, sample: int) -> Iterator[AudioFrame]:
        """Frames from somewhat before `sample` on, if the very same samples come out then; else from the start."""
        stream = self.feed.stream
        seconds = Fraction(sample, self.rate_hz) - _SEEK_EARLIER_SECONDS
        codecs = _SEEKABLE.get(self.format)
        if seconds <= 0 or codecs is None or not streams.codec_name(stream).startswith(codecs):
            return self.begun
        assert stream.time_base is not None
        self.feed.container.seek(int((seconds + self.origin) / stream.time_base), stream=stream)
        stream.codec_context.flush_buffers()
        return self.feed.frames()


@contextmanager
def _open_track(file: BinaryIO, longest_seconds: float) -> Iterator[_Track]:
    signature = identify(file, stage="decode", name="sound")
    format = signature.format
    if signature.modality != "video":  # of which sound is a kind, by first bytes
        raise ItemError("decode", "no_audio_stream", f"{format} has no sound")
    # Ogg promises nothing: libav looks where the last page ends, of those that are there.
    stated = 0.0 if format == "ogg" else stated_seconds(file, format)
    with streams.open_container(file, format) as container:
        stream = streams.heard_stream(container)
        if stream is None:
            raise ItemError("decode", "no_audio_stream", f"{container.format.name} without sound that can be decoded")
        for other in container.streams:
            if other.index != stream.index:
                other.discard = Discard.all
        stream.codec_context.thread_type = "NONE"
        stream.codec_context.thread_count = 1  # many processes decode at once
        feed = _Feed(container, stream)
        frames = feed.frames()
        first = next(frames, None)
        if first is None:
            raise ItemError("decode", "corrupt", f"none of {feed.fed} packets decodes to sound")
        if first.sample_rate > streams.HIGHEST_RATE_HZ:
            raise ItemError("decode", "corrupt", f"a sound of {first.sample_rate} Hz")
        starts = [streams.first_picture(container), _time(first)]
        yield _Track(
            feed=feed,
            format=format,
            origin=min((start for start in starts if start is not None), default=Fraction(0)),
            rate_hz=first.sample_rate,
            declared_seconds=streams.sound_duration(container, stream) if stated is None else stated,
            longest_seconds=longest_seconds,
            begun=itertools.chain([first], frames),
        )


def _time(frame: AudioFrame) -> Fraction | None:
    return None if frame.pts is None or frame.time_base is None else frame.pts * frame.time_base


@dataclass(slots=True)
class _Mixer:
    """Frames of one stream as one channel."""

    _packing: AudioResampler | None = None
    _packs: tuple[str, str] = ("", "")

    def mono(self, frame: AudioFrame) -> Samples:
        """The mean of the channels; what is not a number, or no sound by its size, is silence."""
        is_planar = frame.format.is_planar
        known = frame.format.name.removesuffix("p") if is_planar else frame.format.name
        if known not in _KNOWN_FORMATS or (is_planar and frame.layout.nb_channels > _MOST_PLANES):
            frame = self._packed(frame)
        array: npt.NDArray[Any] = frame.to_ndarray()
        if array.dtype.kind == "f" and not (np.abs(array) <= _LOUDEST).all():
            array = np.where(np.abs(array) <= _LOUDEST, array, 0.0)
        if not frame.format.is_planar:
            array = array.reshape(frame.samples, -1).T  # (channels, samples)
        scaled: npt.NDArray[np.float32] = array.astype(np.float32, copy=False)
        if array.dtype == np.uint8:
            scaled = (scaled - np.float32(128)) / np.float32(128)
        elif array.dtype in _FULL_SCALE:
            scaled = scaled / np.float32(_FULL_SCALE[array.dtype])
        mean: Samples = scaled[0] if len(scaled) == 1 else scaled.mean(axis=0, dtype=np.float32)
        return mean

    def _packed(self, frame: AudioFrame) -> AudioFrame:
        kind = (frame.format.name, frame.layout.name)
        if self._packing is None or kind != self._packs:
            self._packs = kind
            self._packing = AudioResampler(format="flt", layout=frame.layout, rate=frame.sample_rate)
        frame.pts = None  # consecutive, whatever its own time is
        [packed] = self._packing.resample(frame)
        return packed


def _placed(track: _Track, begin: int) -> Iterator[tuple[int, Samples]]:
    """(position from time 0 in samples, samples) of the frames that are needed from `begin` on."""
    at: int | None = None
    mixer = _Mixer()
    for frame in track.frames_from(begin):
        if frame.sample_rate != track.rate_hz:
            raise ItemError("decode", "corrupt", f"the sound goes from {track.rate_hz} to {frame.sample_rate} Hz")
        time = _time(frame)
        samples = mixer.mono(frame)
        timed = at if time is None else round((time - track.origin) * track.rate_hz)
        position = at if at is not None else timed or 0
        if timed is not None and abs(timed - position) > _JITTER_SECONDS * track.rate_hz:
            position = timed
        yield position, samples
        at = position + len(samples)


def _trimmed(placed: Iterator[tuple[int, Samples]], end: int | None) -> Iterator[tuple[int, Samples]]:
    """The last of them only up to `end`, if that lies within it: farther ahead, and it is not the padding's."""
    held: tuple[int, Samples] | None = None
    for each in placed:
        if held is not None:
            yield held
        held = each
    if held is not None:
        position, samples = held
        yield position, samples if end is None or end <= position else samples[: end - position]


def _window(track: _Track, begin: int, end: int) -> Iterator[Samples]:
    """Samples `begin` (negative: silence) up to `end`, or where the sound ends; gaps are silence.

    What steps back in time (joined transport streams) is passed over, unless that does not end.
    """
    at = begin
    reached = passed_over = 0
    for position, samples in _trimmed(_placed(track, begin), track.exact_end):
        passed_over += max(0, min(len(samples), reached - position))
        reached = max(reached, position + len(samples))
        if passed_over > track.longest_seconds * track.rate_hz:
            raise _too_long(track.longest_seconds)
        while at < min(position, end):
            silence = min(_BLOCK_SAMPLES, min(position, end) - at)
            yield np.zeros(silence, np.float32)
            at += silence
        taken = samples[max(0, at - position) : max(0, end - position)]
        if taken.size:
            yield taken
            at += taken.size
        if at >= end:
            return


def _part(track: _Track, rate_hz: int, start_seconds: float, stop_seconds: float | None) -> Iterator[Samples]:
    first = round(start_seconds * rate_hz)
    most = math.ceil(track.longest_seconds * rate_hz)
    last = first + most + 1 if stop_seconds is None else round(stop_seconds * rate_hz)
    if last - first > most and stop_seconds is not None:
        raise _too_long(track.longest_seconds)
    done = 0
    for block in _resampled(track, rate_hz, first, last):
        done += block.size
        if done > most:
            raise _too_long(track.longest_seconds)
        yield block
    _check(track, (first + done) / rate_hz, stop_seconds, done)


def _too_long(longest_seconds: float) -> ItemError:
    return ItemError("decode", "over_budget_duration", f"more than {longest_seconds:,.0f} s of sound")


def _resampled(track: _Track, rate_hz: int, first: int, last: int) -> Iterator[Samples]:
    """Samples `first` up to `last` at `rate_hz`, or up to where the sound ends."""
    if track.rate_hz == rate_hz:
        yield from _window(track, first, last)
        return
    # The filter's phases come in one order from every multiple of `step_in` samples on, which are `step_out` there.
    common = math.gcd(track.rate_hz, rate_hz)
    step_in, step_out = track.rate_hz // common, rate_hz // common
    reach = _FILTER_SAMPLES * max(1, math.ceil(Fraction(track.rate_hz, rate_hz)))
    steps = math.floor(Fraction(first, step_out)) - math.ceil(Fraction(reach, step_in))
    begin = steps * step_in
    end = math.ceil(Fraction(last * step_in, step_out)) + reach
    resampler = AudioResampler(format="fltp", layout="mono", rate=rate_hz, options=_RESAMPLING)
    fed, at = 0, steps * step_out
    for block in _joined(_window(track, begin, end)):
        for samples in _through(resampler, block, fed, track.rate_hz):
            yield from _cut(samples, at, first, last)
            at += samples.size
        fed += block.size
    last = min(last, math.ceil(Fraction((begin + fed) * step_out, step_in)))
    while at < last:
        silence = np.zeros(reach, np.float32)
        for samples in _through(resampler, silence, fed, track.rate_hz):
            yield from _cut(samples, at, first, last)
            at += samples.size
        fed += reach


def _joined(pieces: Iterator[Samples]) -> Iterator[Samples]:
    """Pieces of a few thousand samples as blocks."""
    held: list[Samples] = []
    for piece in pieces:
        held.append(piece)
        if sum(map(len, held)) >= _BLOCK_SAMPLES:
            yield np.concatenate(held)
            held = []
    if held:
        yield np.concatenate(held)


def _through(resampler: AudioResampler, samples: Samples, position: int, rate_hz: int) -> Iterator[Samples]:
    frame = AudioFrame.from_ndarray(np.ascontiguousarray(samples[np.newaxis]), format="fltp", layout="mono")
    frame.sample_rate, frame.pts, frame.time_base = rate_hz, position, Fraction(1, rate_hz)
    for out in resampler.resample(frame):
        yield out.to_ndarray()[0]


def _cut(samples: Samples, at: int, first: int, last: int) -> Iterator[Samples]:
    taken = samples[max(0, first - at) : max(0, last - at)]
    if taken.size:
        yield taken


def _check(track: _Track, reached_seconds: float, stop_seconds: float | None, num_samples: int) -> None:
    """Raise when too much of what was promised is not there."""
    if track.feed.rejected > max(2, 0.05 * track.feed.fed):
        raise ItemError(
            "decode", "corrupt", f"{track.feed.rejected} of {track.feed.fed} packets of sound do not decode"
        )
    promised = min((s for s in (track.declared_seconds, stop_seconds) if s), default=0.0)
    allowed = max(2 * track.feed.frame_seconds, 0.05 * (track.declared_seconds or promised))
    if promised - reached_seconds > allowed or not num_samples:
        raise ItemError(
            "decode", "truncated", f"the sound ends at {reached_seconds:.3f} s, {promised:.3f} s were expected"
        )
