"""Drawn media after their codecs: what a decoder hands to a model, for training and for tests."""

import io
import random
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
from PIL import Image

from pipeline.demo import media, scenes
from pipeline.demo.media import ImageFormat, VideoCodec
from pipeline.demo.scenes import Kind, Pixels, Scene

SAMPLING_FPS = 2.0
MIN_FRAMES, MAX_FRAMES = 4, 16
# JPEG and H.264 are what most archives hold; PNG is the dear one to write.
IMAGE_FORMAT_WEIGHTS: dict[ImageFormat, float] = {"jpeg": 0.5, "png": 0.2, "webp": 0.3}
VIDEO_CODEC_WEIGHTS: dict[VideoCodec, float] = {"h264": 0.5, "hevc": 0.25, "vp9": 0.25}


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """What a decoder hands to the processor: `uint8 (H, W, 3)`, or `(T, H, W, 3)` with the clip's metadata."""

    scene: Scene
    pixels: Pixels
    video_metadata: dict[str, Any] | None = None


def image_item(scene: Scene, format: ImageFormat, rng: random.Random) -> Item:
    """A drawn image after a round trip through `format`."""
    data = media.encode_image(scenes.draw_image(scene, rng), format, rng)
    return Item(scene=scene, pixels=np.array(Image.open(io.BytesIO(data)).convert("RGB")))


def clip_item(scene: Scene, codec: VideoCodec, rng: random.Random, *, fps_share: float = 1.0) -> Item:
    """A drawn clip after a round trip through `codec`, cut down to its sampled frames (see `sample_frames`)."""
    frames, fps = scenes.clip_frames(scene, rng)
    data = media.encode_video(frames, fps, codec, b_frames=rng.choice((0, 2)))
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        shown = list(container.decode(stream))
        rate = float(stream.average_rate)
    pts_seconds = np.array([frame.time - shown[0].time for frame in shown])
    indices = sample_frames(pts_seconds, len(shown) / rate, rng, fps_share=fps_share)
    metadata = {
        "total_num_frames": len(shown),
        "fps": rate,
        "duration": len(shown) / rate,
        "frames_indices": indices,
    }
    pixels = np.stack([shown[i].to_ndarray(format="rgb24") for i in indices])
    return Item(scene=scene, pixels=pixels, video_metadata=metadata)


def sample_frames(
    pts_seconds: np.ndarray, duration_seconds: float, rng: random.Random, *, fps_share: float
) -> list[int]:
    """Indices of the frames shown at two frames a second, held between `MIN_FRAMES` and `MAX_FRAMES`.

    With a chance of `1 - fps_share`: at 4-8 evenly spaced times instead.
    """
    times = np.arange(0, duration_seconds, 1 / SAMPLING_FPS)
    if rng.random() >= fps_share:
        times = np.linspace(0, pts_seconds[-1], rng.randint(MIN_FRAMES, 8))
    elif not MIN_FRAMES <= len(times) <= MAX_FRAMES:
        times = np.linspace(0, pts_seconds[-1], min(max(len(times), MIN_FRAMES), MAX_FRAMES))
    return (np.searchsorted(pts_seconds, times + 1e-6, side="right") - 1).tolist()


def training_item(scene: Scene, rng: random.Random, *, fps_share: float = 1.0) -> Item:
    """An item of `scene` in a format or codec drawn by weight."""
    if scene.kind == "image":
        return image_item(scene, _weighted(IMAGE_FORMAT_WEIGHTS, rng), rng)
    return clip_item(scene, _weighted(VIDEO_CODEC_WEIGHTS, rng), rng, fps_share=fps_share)


def seen_scenes(kind: Kind) -> list[Scene]:
    """The scenes that are not held out, sorted."""
    return sorted(set(scenes.all_scenes(kind)) - scenes.held_out(kind))


def _weighted(weights: dict[Any, float], rng: random.Random) -> Any:
    return rng.choices(list(weights), list(weights.values()))[0]
