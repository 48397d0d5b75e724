"""Small sound files for the tests, with samples that are known."""

import struct
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from tests.media.media_files import picture

LAYOUTS = {1: "mono", 2: "stereo", 3: "2.1", 4: "4.0", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}
_FRAME = 1000


def sweep(rate: int, seconds: float, highest: float = 3000.0) -> np.ndarray:
    """`float32 (N,)`: a tone that rises from 100 Hz and swells, so that no place is like another."""
    t = np.arange(round(rate * seconds)) / rate
    phase = 2 * np.pi * (100 * t + (highest - 100) * t**2 / (2 * seconds))
    return (0.5 * np.sin(phase) * (0.2 + 0.8 * t / seconds)).astype(np.float32)


def make_sound(
    container: str,
    library: str,
    samples: np.ndarray,
    rate: int,
    *,
    starts: Sequence[int] = (0,),
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    sample_format: str | None = None,
    video_seconds: float = 0.0,
) -> bytes:
    """`samples` (N,) or (channels, N), in as many equal pieces as there are `starts`, in samples of the file's clock.

    With `video_seconds`, beside pictures from time 0 on.
    """
    samples = np.atleast_2d(samples).astype(np.float32)
    layout = LAYOUTS[len(samples)]
    with (
        tempfile.NamedTemporaryFile() as file,  # `faststart` reads back what it wrote, by name
        av.open(file.name, "w", format=container, options=container_options or {}) as output,
    ):
        stream = output.add_stream(library, rate=rate, layout=layout, options={"strict": "-2", **(options or {})})
        if sample_format:
            stream.codec_context.format = sample_format
        if video_seconds:
            video = output.add_stream("libx264", rate=10, width=96, height=64, options={"threads": "1"})
            video.pix_fmt = "yuv420p"
            for i in range(round(10 * video_seconds)):
                picture_frame = av.VideoFrame.from_ndarray(picture(i), format="rgb24")
                picture_frame.pts, picture_frame.time_base = i, Fraction(1, 10)
                output.mux(video.encode(picture_frame))
            output.mux(video.encode(None))
        for start, piece in zip(starts, np.array_split(samples, len(starts), axis=1), strict=True):
            convert = av.AudioResampler(
                format=sample_format or stream.codec_context.format.name,
                layout=layout,
                rate=rate,
                frame_size=stream.codec_context.frame_size or _FRAME,
            )
            packed = np.ascontiguousarray(piece.T).reshape(1, -1)  # PyAV 18 cannot take eight planes
            frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=layout)
            frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
            for ready in [*convert.resample(frame), *convert.resample(None)]:
                output.mux(stream.encode(ready))
        output.mux(stream.encode(None))
        output.close()
        return Path(file.name).read_bytes()


def with_cover(mp3: bytes, picture_bytes: bytes) -> bytes:
    """An ID3v2.3 tag with a front cover (`APIC`) ahead of the frames."""
    body = b"\x00image/png\x00\x03\x00" + picture_bytes
    frame = b"APIC" + struct.pack(">I", len(body)) + b"\x00\x00" + body
    size = bytes(len(frame) >> shift & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\x03\x00\x00" + size + frame + mp3


def wave(samples: np.ndarray, rate: int, *, data_bytes: int | None = None) -> bytes:
    """16-bit PCM by hand, `samples` (channels, N) in -1 to 1; `data_bytes` is what the header says, true or not."""
    channels = len(samples)
    data = np.round(samples.T * 32767).astype("<i2").tobytes()
    format = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, 2 * channels * rate, 2 * channels, 16)
    stated = len(data) if data_bytes is None else data_bytes
    return (
        struct.pack("<4sI4s", b"RIFF", min(2**32 - 1, stated + 36), b"WAVE")
        + format
        + struct.pack("<4sI", b"data", stated)
        + data
    )


def lag(found: np.ndarray, expected: np.ndarray) -> int:
    """By how many samples `found` is late, from the peak of their correlation."""
    size = 1 << (len(found) + len(expected)).bit_length()
    spectrum = np.fft.rfft(found, size) * np.conj(np.fft.rfft(expected, size))
    peak = int(np.argmax(np.fft.irfft(spectrum, size)))
    return peak if peak < size // 2 else peak - size
