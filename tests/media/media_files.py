"""Small media files for the tests, and the plain full decode that everything else is compared with."""

import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

WIDTH, HEIGHT = 96, 64


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a clip is encoded. `times` are frame times in 1/`rate` s; None is one frame a tick."""

    container: str = "mp4"
    library: str = "libx264"
    rate: int = 30
    num_frames: int = 90
    times: Sequence[int] | None = None
    start: int = 0
    rotation: int = 0
    mirrored: bool = False
    options: dict[str, str] = field(default_factory=dict)
    container_options: dict[str, str] = field(default_factory=dict)
    pix_fmt: str = "yuv420p"
    size: tuple[int, int] = (HEIGHT, WIDTH)


def picture(i: int, size: tuple[int, int] = (HEIGHT, WIDTH)) -> np.ndarray:
    """A frame unlike its neighbours: a moving gradient with a block whose place depends on `i`."""
    height, width = size
    y, x = np.mgrid[0:height, 0:width]
    frame = np.stack([(x * 2 + i * 5) % 256, (y * 3 + i * 7) % 256, (x + y + i * 11) % 256], axis=-1).astype(np.uint8)
    top, left = (i * 5) % (height - 16), (i * 9) % (width - 16)
    frame[top : top + 16, left : left + 16] = (255, (i * 40) % 256, 0)
    return frame


def make_video(recipe: Recipe) -> bytes:
    """The file's bytes."""
    options = {"threads": "1", **recipe.options}
    with (
        tempfile.NamedTemporaryFile() as file,  # `faststart` reads back what it wrote, by name
        av.open(file.name, "w", format=recipe.container, options=recipe.container_options) as container,
    ):
        height, width = recipe.size
        stream = container.add_stream(recipe.library, rate=recipe.rate, width=width, height=height, options=options)
        stream.pix_fmt = recipe.pix_fmt
        stream.codec_context.time_base = Fraction(1, recipe.rate)
        if recipe.rotation or recipe.mirrored:
            stream.set_display_rotation(recipe.rotation, hflip=recipe.mirrored)
        times = recipe.times or range(recipe.num_frames)
        for i, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(picture(i, recipe.size), format="rgb24")
            frame.pts, frame.time_base = time + recipe.start, Fraction(1, recipe.rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        container.close()
        return Path(file.name).read_bytes()


GROUP = Recipe(num_frames=30, size=(360, 640), options={"g": "30", "bf": "0", "crf": "10", "sc_threshold": "0"})


def long_video(*, num_groups: int, container: str = "mp4", movflags: str = "faststart") -> bytes:
    """One closed group of 30 frames, 1 s, muxed again and again."""
    with tempfile.NamedTemporaryFile() as file:
        write_long_video(file.name, make_video(GROUP), num_groups=num_groups, container=container, movflags=movflags)
        return Path(file.name).read_bytes()


def write_long_video(path: str, group: bytes, *, num_groups: int, container: str, movflags: str = "") -> None:
    """The file `path`: the packets of `group`, a video of 1 s, again and again."""
    options = {"movflags": movflags} if movflags and container == "mp4" else {}
    with av.open(io.BytesIO(group)) as source, av.open(path, "w", format=container, options=options) as output:
        stream = source.streams.video[0]
        packets = [(bytes(packet), packet) for packet in source.demux(stream) if packet.size]
        written = output.add_stream_from_template(stream)
        for number in range(num_groups):
            for data, packet in packets:
                copy = av.Packet(data)
                copy.stream, copy.time_base, copy.is_keyframe = written, stream.time_base, packet.is_keyframe
                copy.pts, copy.dts = (t + number * round(1 / stream.time_base) for t in (packet.pts, packet.dts))
                output.mux(copy)


def make_audio(container: str, library: str) -> bytes:
    """Half a second of silence."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(library, rate=48000, layout="mono")
        format = stream.codec_context.format.name
        for k in range(24):
            samples = np.zeros((1, 1024), np.float32 if format.startswith("flt") else np.int16)
            frame = av.AudioFrame.from_ndarray(samples, format=format, layout="mono")
            frame.rate, frame.pts = 48000, k * 1024
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def make_image(format: str, mode: str = "RGB", **options: object) -> bytes:
    """A picture as a file."""
    file = io.BytesIO()
    Image.fromarray(picture(3)).convert(mode).save(file, format, **options)
    return file.getvalue()


def full_decode(data: bytes) -> list[tuple[float, np.ndarray]]:
    """(seconds from the first frame, RGB) of every frame, as a plain PyAV user gets them; not turned upright."""
    with av.open(io.BytesIO(data)) as container:
        stream = max(container.streams.video, key=lambda s: s.width * s.height)
        frames = [(frame.pts, frame.to_ndarray(format="rgb24")) for frame in container.decode(stream)]
        return [(float((pts - frames[0][0]) * stream.time_base), pixels) for pts, pixels in frames]


def shown_at(frames: list[tuple[float, np.ndarray]], seconds: float) -> np.ndarray:
    """The last frame at or before `seconds`."""
    return [pixels for time, pixels in frames if time <= seconds + 1e-6][-1]


def riff_wave() -> bytes:
    """A WAV file written by hand: 100 samples of silence."""
    samples = bytes(200)
    head = b"fmt " + (16).to_bytes(4, "little") + b"\x01\x00\x01\x00\x80\xbb\x00\x00\x00\x77\x01\x00\x02\x00\x10\x00"
    body = b"WAVE" + head + b"data" + len(samples).to_bytes(4, "little") + samples
    return b"RIFF" + len(body).to_bytes(4, "little") + body
