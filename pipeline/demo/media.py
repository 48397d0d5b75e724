"""Drawn scenes as ordinary media files: JPEG, PNG, WebP, H.264, HEVC and VP9, and a manifest that lists them."""

import io
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import av
import numpy as np
from PIL import Image

from pipeline.demo import scenes
from pipeline.demo.scenes import Kind, Pixels, Scene
from pipeline.storage import Folder

ImageFormat = Literal["jpeg", "png", "webp"]
VideoCodec = Literal["h264", "hevc", "vp9"]

IMAGE_FORMATS: tuple[ImageFormat, ...] = ("jpeg", "png", "webp")
VIDEO_CODECS: tuple[VideoCodec, ...] = ("h264", "hevc", "vp9")
IMAGE_SUFFIXES: dict[ImageFormat, str] = {"jpeg": ".jpg", "png": ".png", "webp": ".webp"}
VIDEO_SUFFIXES: dict[VideoCodec, str] = {"h264": ".mp4", "hevc": ".mp4", "vp9": ".webm"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Encoding:
    library: str
    container: str
    options: dict[str, str]
    tag: str | None = None


_ENCODINGS: dict[VideoCodec, _Encoding] = {
    # Not "veryfast": with B-frames x264's assembly then reads memory that nobody wrote (5 of 6 encodings of one clip
    # differed; none with no-asm, none with "superfast").
    "h264": _Encoding(library="libx264", container="mp4", options={"preset": "superfast", "crf": "23"}),
    "hevc": _Encoding(
        library="libx265",
        container="mp4",
        options={
            "preset": "ultrafast",
            "crf": "25",
            "x265-params": "pools=none:frame-threads=1:log-level=none",
        },
        tag="hvc1",
    ),
    "vp9": _Encoding(
        library="libvpx-vp9",
        container="webm",
        options={"deadline": "realtime", "cpu-used": "8", "crf": "30", "b": "0"},
    ),
}


def encode_image(pixels: Pixels, format: ImageFormat, rng: random.Random) -> bytes:
    """The file's bytes for `uint8 (H, W, 3)` RGB; the quality of JPEG and WebP (70-95) comes from `rng`.

    PNG is lossless. Raises ValueError for another format.
    """
    if format not in IMAGE_FORMATS:
        raise ValueError(f"an image format is one of {', '.join(IMAGE_FORMATS)}; got {format!r}")
    options: dict[str, Any] = {} if format == "png" else {"quality": rng.randint(70, 95)}
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format, **options)
    return file.getvalue()


def encode_video(
    frames: Iterable[Pixels], fps: float, codec: VideoCodec, *, b_frames: int = 0, keyframe_interval: int = 30
) -> bytes:
    """The file's bytes (MP4 for h264 and hevc, WebM for vp9) for `uint8 (H, W, 3)` RGB frames with even sides.

    One thread, no dates and no random identifiers, so equal arguments give equal bytes. `b_frames` is the longest run
    of B-frames (H.264 only). Raises ValueError for another codec, odd sides or no frames.
    """
    if codec not in VIDEO_CODECS:
        raise ValueError(f"a video codec is one of {', '.join(VIDEO_CODECS)}; got {codec!r}")
    encoding = _ENCODINGS[codec]
    options = {**encoding.options, "g": str(keyframe_interval)}
    if codec == "h264":
        options["bf"] = str(b_frames)
    rate = Fraction(fps).limit_denominator(1001)
    file = io.BytesIO()
    with av.open(file, "w", format=encoding.container, container_options={"fflags": "+bitexact"}) as container:
        stream: Any = None
        for index, pixels in enumerate(frames):
            if stream is None:
                stream = _add_stream(container, encoding, options, rate, pixels)
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts, frame.time_base = index, 1 / rate
            container.mux(stream.encode(frame))
        if stream is None:
            raise ValueError("a video needs at least one frame; got none")
        container.mux(stream.encode())
    return file.getvalue()


def _add_stream(container: Any, encoding: _Encoding, options: dict[str, str], rate: Fraction, first: Pixels) -> Any:
    height, width = first.shape[:2]
    if height % 2 or width % 2:
        raise ValueError(f"4:2:0 video needs even sides; got {width} x {height}")
    stream = container.add_stream(encoding.library, rate=rate, options=options)
    stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
    stream.codec_context.thread_count = 1
    stream.codec_context.thread_type = "NONE"
    if encoding.tag:
        stream.codec_context.codec_tag = encoding.tag
    return stream


def make_demo_media(manifest_url: str, *, images: int, videos: int, seed: int, captions: int = 0) -> None:
    """Writes `images + videos` drawn media beside `manifest_url` (any fsspec URL), and lastly the manifest itself.

    In the manifest's folder: `media/<id>.<suffix>`, `truth.jsonl` (one object a line: `id`, then question → answer),
    `labels.jsonl` (`id`, and by class what a description has to say: `headrace evaluate` reads it) and the manifest
    (`{"id", "media": [{"uri", "modality"}]}`, uris relative to its folder). Scenes come from all combinations, held-out
    ones included; formats and codecs take turns. Equal arguments give equal bytes. Nothing is written when the manifest
    exists, and the manifest appears whole or not at all, so a first start that was killed half-way is simply made
    again. With `captions` the manifest ends with as many rows `{"id", "text"}`, which describe the first of the media.
    """
    parent, _, manifest_name = manifest_url.rpartition("/")
    folder = Folder(parent or ".")
    if folder.exists(manifest_name):
        return
    manifest, truth, labels = [], [], []
    for kind, number, scene in _selection(images, videos, seed):
        item_id = f"{kind}-{number:04d}"
        suffix, data = _file(scene, number, random.Random(f"{seed}/{item_id}"))
        uri = f"media/{item_id}{suffix}"
        folder.write_bytes(uri, data)
        manifest.append({"id": item_id, "media": [{"uri": uri, "modality": kind}]})
        labels.append({"id": item_id, "expected": scenes.expected(scene)})
        truth.append({"id": item_id} | {q: scenes.answer(scene, q) for q in scenes.QUESTIONS[kind]})
    described = [row[scenes.DESCRIBE] for row in truth[:captions]]
    manifest += [{"id": f"caption-{number:04d}", "text": text} for number, text in enumerate(described)]
    folder.write_bytes("truth.jsonl", _json_lines(truth))
    folder.write_bytes("labels.jsonl", _json_lines(labels))
    folder.write_bytes(manifest_name, _json_lines(manifest))


def _selection(images: int, videos: int, seed: int) -> list[tuple[Kind, int, Scene]]:
    """(kind, number within the kind, scene) with the kinds spread evenly through the list."""
    counts: dict[Kind, int] = {"image": images, "video": videos}
    chosen = []
    for kind, count in counts.items():
        order = list(scenes.all_scenes(kind))
        random.Random(f"{seed}/{kind}").shuffle(order)
        chosen += [((number + 0.5) / count, kind, number, order[number % len(order)]) for number in range(count)]
    return [(kind, number, scene) for _, kind, number, scene in sorted(chosen)]


def _file(scene: Scene, number: int, rng: random.Random) -> tuple[str, bytes]:
    """(suffix, bytes); `number` picks the format or codec, and B-frames for every other H.264 file."""
    if scene.kind == "image":
        format = IMAGE_FORMATS[number % len(IMAGE_FORMATS)]
        return IMAGE_SUFFIXES[format], encode_image(scenes.draw_image(scene, rng), format, rng)
    codec = VIDEO_CODECS[number % len(VIDEO_CODECS)]
    frames, fps = scenes.clip_frames(scene, rng)
    b_frames = 2 * (number // len(VIDEO_CODECS) % 2)
    return VIDEO_SUFFIXES[codec], encode_video(frames, fps, codec, b_frames=b_frames)


def _json_lines(rows: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
