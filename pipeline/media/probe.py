"""Facts from a media header: nothing is decoded, nothing large is allocated."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import Any, BinaryIO, Literal

import av
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.stream import Disposition, Stream
from av.video.stream import VideoStream

from pipeline.errors import ItemError
from pipeline.media import streams
from pipeline.media.document import DEFAULT_DPI, probe_page, read_page_count
from pipeline.media.pillow import PILLOW_ERRORS, open_image, presented_size, reason
from pipeline.media.sniff import Signature, identify, stated_seconds
from pipeline.schema import Modality, Probe


def probe_media(
    file: BinaryIO,
    *,
    num_bytes: int,
    declared: Modality | None,
    name: str,
    page: int | None = None,
    dpi: float = DEFAULT_DPI,
) -> Probe:
    """What the header of `file` says, by content alone; of a PDF, what it says of `page` (from 0) drawn at `dpi`.

    `declared` is the modality that the manifest or the file name claims. A container of pictures and sound is a video,
    or the sound of one where `declared` is audio; cover art is no picture. Raises `ItemError` (stage `probe`):
    `unknown_format` (which a PDF of no named page is, too, if it can be opened), `modality_mismatch`, `corrupt_header`,
    `no_video_stream`, `no_audio_stream`, `unsupported_codec`, `zero_dimensions`, and what `probe_page` raises. A file
    cut off behind its header passes here and fails in decode.
    """
    signature = identify(file, stage="probe", name=name)
    if declared is not None and ("video" if declared == "audio" else declared) != signature.modality:
        raise ItemError(
            "probe",
            "modality_mismatch",
            f"{name}: declared {declared}, the content is "
            f"{'video or audio' if signature.modality == 'video' else signature.modality} ({signature.format})",
        )
    if signature.modality == "page":
        if page is None:
            read_page_count(file, name)
            raise ItemError("probe", "unknown_format", f"{name}: a PDF is taken by its pages, and none is named")
        return probe_page(file, page, num_bytes=num_bytes, dpi=dpi, name=name)
    if signature.modality == "image":
        facts = _probe_image(file, signature, num_bytes, name)
    else:
        facts = _probe_container(file, signature, num_bytes, declared, name)
    if facts.modality == "audio":
        if not 0 < facts.sample_rate_hz <= streams.HIGHEST_RATE_HZ or facts.num_channels <= 0:
            raise ItemError(
                "probe", "corrupt_header", f"{name}: {facts.sample_rate_hz} Hz, {facts.num_channels} channels"
            )
    elif facts.width <= 0 or facts.height <= 0:
        raise ItemError(
            "probe", "zero_dimensions", f"{name}: {signature.format} of {facts.width}x{facts.height} pixels"
        )
    return facts


def _probe_image(file: BinaryIO, signature: Signature, num_bytes: int, name: str) -> Probe:
    try:
        with open_image(file, signature.format, stage="probe") as image:
            width, height = presented_size(image)
    except ItemError as error:
        raise ItemError(error.stage, error.code, f"{name}: {error.message}") from error
    except PILLOW_ERRORS as error:
        raise _corrupt(signature, name, error) from error
    format = signature.format.lower()
    return Probe(modality="image", container=format, codec=format, width=width, height=height, num_bytes=num_bytes)


def _probe_container(
    file: BinaryIO, signature: Signature, num_bytes: int, declared: Modality | None, name: str
) -> Probe:
    stated = stated_seconds(file, signature.format)
    try:
        if declared != "audio":
            with streams.open_by_header(file, signature.format, is_decoded=False) as told:
                pictures = streams.shown_stream(told) if told is not None else None
                if told is not None and pictures is not None:
                    return _video_facts(told, pictures, signature, num_bytes)
        with streams.open_container(file, signature.format) as container:
            pictures, sound = streams.shown_stream(container), streams.heard_stream(container)
            if pictures is not None and declared != "audio":
                return _video_facts(container, pictures, signature, num_bytes)
            if declared == "video" or (declared is None and _unknown(container.streams.video)):
                raise _missing(container, "video", name)
            if sound is None:
                raise _missing(container, "audio" if declared == "audio" else "video", name)
            return _sound_facts(container, sound, signature, num_bytes, stated)
    except av.FFmpegError as error:
        raise _corrupt(signature, name, error) from error


def _video_facts(container: InputContainer, stream: VideoStream, signature: Signature, num_bytes: int) -> Probe:
    context = stream.codec_context
    width, height = streams.orientation(container, stream).size(context.width, context.height)
    rate = streams.frame_rate(stream)
    codec = streams.codec_name(stream)
    num_frames = stream.frames
    duration = streams.declared_duration(container, stream)
    if not duration:
        duration, num_frames = _measure(container, stream, rate)
    return Probe(
        modality="video",
        container=signature.format,
        codec=codec,
        width=width,
        height=height,
        num_bytes=num_bytes,
        duration_seconds=duration,
        rate_fps=rate,
        num_frames=num_frames or max(1, round(duration * rate)),
        reorder_depth=streams.reorder_depth(stream),
        **_packet_facts(container, stream, duration, rate),
    )


def _packet_facts(container: InputContainer, stream: VideoStream, duration: float, rate: float) -> dict[str, Any]:
    """What the header's table of packets says (0.3 µs a packet), or Matroska's cues, which name keyframes only."""
    entries = list(stream.index_entries)
    if entries and not any(entry.size for entry in entries):
        return _cue_facts(container, stream, duration, rate)
    keyframes = [number for number, entry in enumerate(entries) if entry.is_keyframe]
    # libav keeps a size in 30 bits with a sign: of a table that lies it may be below 0.
    if not keyframes or min(entry.size for entry in entries) < 0:
        return {}
    return {
        "coded_frames": len(entries),
        "coded_bytes": sum(entry.size for entry in entries),
        "keyframes": len(keyframes),
        "keyframe_bytes": sum(entries[number].size for number in keyframes),
        **_groups([*keyframes, len(entries)]),
    }


def _cue_facts(container: InputContainer, stream: VideoStream, duration: float, rate: float) -> dict[str, Any]:
    # libav reads the cues when it is first to seek; without any it looks for one more keyframe.
    with contextlib.suppress(av.FFmpegError):
        container.seek(stream.start_time or 0, stream=stream)
    if not rate or stream.time_base is None:
        return {}
    ticks = sorted({entry.timestamp for entry in stream.index_entries if entry.is_keyframe})
    numbers = [round(float((tick - ticks[0]) * stream.time_base) * rate) for tick in ticks]
    num_frames = round(duration * rate)
    if not numbers or numbers[-1] < num_frames / 2 or numbers[-1] >= num_frames:  # few of them, or none
        return {}
    return _groups([*numbers, num_frames])


def _groups(borders: Sequence[int]) -> dict[str, Any]:
    """Of groups of pictures that begin at frames `borders`, the last of which is the end."""
    groups = [stop - start for start, stop in itertools.pairwise(borders)]
    spacing = groups[0] if set(groups[:-1]) <= {groups[0]} and groups[-1] <= groups[0] else 0
    return {"keyframe_spacing": spacing, "group_frames": sum(group**2 for group in groups) / sum(groups)}


def _measure(container: InputContainer, stream: VideoStream, rate: float) -> tuple[float, int]:
    """Duration and frames counted over all packets, for recordings whose header was never finished (live WebM)."""
    times = [packet.pts for packet in container.demux(stream) if packet.size and packet.pts is not None]
    if not times or stream.time_base is None:
        return 0.0, 0
    last_frame = 1 / rate if rate else 0.0
    return float((max(times) - min(times)) * stream.time_base) + last_frame, len(times)


def _sound_facts(
    container: InputContainer, stream: AudioStream, signature: Signature, num_bytes: int, stated: float | None
) -> Probe:
    context = stream.codec_context
    codec, rate_hz, channels = streams.codec_name(stream), context.sample_rate, context.channels
    duration = streams.sound_duration(container, stream) if stated is None else stated
    return Probe(
        modality="audio",
        container=signature.format,
        codec=codec,
        width=0,
        height=0,
        num_bytes=num_bytes,
        duration_seconds=duration or _measured_sound(container, stream),
        num_frames=0,
        sample_rate_hz=rate_hz,
        num_channels=channels,
    )


def _measured_sound(container: InputContainer, stream: AudioStream) -> float:
    """As `streams.sound_duration`, over all packets."""
    base, start, end = stream.time_base, math.inf, -math.inf
    for packet in streams.packets(container, stream):
        if packet.pts is not None:
            start, end = min(start, packet.pts), max(end, packet.pts + (packet.duration or 0))
    if base is None or start > end:
        return 0.0
    picture = streams.first_picture(container)
    first = start * float(base)
    return float(end * base) - (first if picture is None else min(first, float(picture)))


def _unknown(tracks: Sequence[Stream]) -> bool:
    """Whether there is one, besides cover art, that cannot be decoded."""
    return any(t.codec_context is None and not t.disposition & Disposition.attached_pic for t in tracks)


def _missing(container: InputContainer, kind: Literal["video", "audio"], name: str) -> ItemError:
    if _unknown(getattr(container.streams, kind)):
        return ItemError(
            "probe", "unsupported_codec", f"{name}: no decoder for the {kind} in this {container.format.name}"
        )
    held = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
    return ItemError(
        "probe", f"no_{kind}_stream", f"{name}: {container.format.name} without a {kind} stream, it holds: {held}"
    )


def _corrupt(signature: Signature, name: str, error: Exception) -> ItemError:
    return ItemError("probe", "corrupt_header", f"{name}: {signature.format} header cannot be read: {reason(error)}")
