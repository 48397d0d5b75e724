"""Facts from a media header: no pixel is decoded, nothing large is allocated."""

from __future__ import annotations

from typing import BinaryIO

import av
from av.container import InputContainer
from av.video.stream import VideoStream

from pipeline.errors import ItemError
from pipeline.media import streams
from pipeline.media.document import DEFAULT_DPI, probe_page
from pipeline.media.pillow import PILLOW_ERRORS, open_image, presented_size, reason
from pipeline.media.sniff import Signature, identify
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

    `declared` is the modality that the manifest or the file name claims. Raises `ItemError` (stage `probe`):
    `unknown_format` (which a PDF without a page is, too), `modality_mismatch`, `corrupt_header`, `no_video_stream`,
    `unsupported_codec`, `zero_dimensions`, and what `probe_page` raises. A file cut off behind its header passes here
    and fails in decode.
    """
    signature = identify(file, stage="probe", name=name)
    if declared is not None and declared != signature.modality:
        raise ItemError(
            "probe",
            "modality_mismatch",
            f"{name}: declared {declared}, the content is {signature.modality} ({signature.format})",
        )
    if signature.modality == "page":
        if page is None:
            raise ItemError("probe", "unknown_format", f"{name}: a PDF is taken by its pages, and none is named")
        return probe_page(file, page, num_bytes=num_bytes, dpi=dpi, name=name)
    probe = _probe_image if signature.modality == "image" else _probe_video
    facts = probe(file, signature, num_bytes, name)
    if facts.width <= 0 or facts.height <= 0:
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


def _probe_video(file: BinaryIO, signature: Signature, num_bytes: int, name: str) -> Probe:
    try:
        with streams.open_container(file, signature.format) as container:
            stream = streams.shown_stream(container)
            if stream is None:
                raise _no_pictures(container, name)
            return _video_facts(container, stream, signature, num_bytes)
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
    )


def _measure(container: InputContainer, stream: VideoStream, rate: float) -> tuple[float, int]:
    """Duration and frames counted over all packets, for recordings whose header was never finished (live WebM)."""
    times = [packet.pts for packet in container.demux(stream) if packet.size and packet.pts is not None]
    if not times or stream.time_base is None:
        return 0.0, 0
    last_frame = 1 / rate if rate else 0.0
    return float((max(times) - min(times)) * stream.time_base) + last_frame, len(times)


def _no_pictures(container: InputContainer, name: str) -> ItemError:
    if any(stream.codec_context is None for stream in container.streams.video):
        return ItemError(
            "probe", "unsupported_codec", f"{name}: no decoder for the video in this {container.format.name}"
        )
    held = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
    return ItemError(
        "probe", "no_video_stream", f"{name}: {container.format.name} without a video stream, it holds: {held}"
    )


def _corrupt(signature: Signature, name: str, error: Exception) -> ItemError:
    return ItemError("probe", "corrupt_header", f"{name}: {signature.format} header cannot be read: {reason(error)}")
