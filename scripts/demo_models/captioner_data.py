"""Training examples and test items of the captioner: drawn, encoded, decoded, sampled and processed as in use."""

import io
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from transformers import Qwen3VLProcessor

from pipeline.demo import media, scenes
from pipeline.demo.media import ImageFormat, VideoCodec
from pipeline.demo.scenes import Kind, Pixels, Scene
from scripts.demo_models.captioner_build import VISION_END

SAMPLING_FPS = 2.0
MIN_FRAMES, MAX_FRAMES = 4, 16
SHARE_OF_FPS_POLICY = 0.75
# JPEG and H.264 are what most archives hold; PNG is the dear one to write.
IMAGE_FORMAT_WEIGHTS: dict[ImageFormat, float] = {"jpeg": 0.5, "png": 0.2, "webp": 0.3}
VIDEO_CODEC_WEIGHTS: dict[VideoCodec, float] = {"h264": 0.5, "hevc": 0.25, "vp9": 0.25}


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """What a decoder hands to the processor: `uint8 (H, W, 3)`, or `(T, H, W, 3)` with the clip's metadata."""

    scene: Scene
    pixels: Pixels
    video_metadata: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """An item as the processor lays it out, cut after the media: the prefix that all its questions share.

    `prefix` and `token_types` are `(tokens,)`, `grid` is `(1, 3)`, `patches` is `uint8 (patches, 3 * 2 * 16 * 16)`.
    """

    scene: Scene
    prefix: torch.Tensor
    token_types: torch.Tensor
    grid: torch.Tensor
    patches: torch.Tensor


def image_item(scene: Scene, format: ImageFormat, rng: random.Random) -> Item:
    """A drawn image after a round trip through `format`."""
    data = media.encode_image(scenes.draw_image(scene, rng), format, rng)
    return Item(scene=scene, pixels=np.array(Image.open(io.BytesIO(data)).convert("RGB")))


def clip_item(scene: Scene, codec: VideoCodec, rng: random.Random) -> Item:
    """A drawn clip after a round trip through `codec`, cut down to its sampled frames."""
    frames, fps = scenes.clip_frames(scene, rng)
    data = media.encode_video(frames, fps, codec, b_frames=rng.choice((0, 2)))
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        shown = list(container.decode(stream))
        rate = float(stream.average_rate)
    pts_seconds = np.array([frame.time - shown[0].time for frame in shown])
    indices = sample_frames(pts_seconds, len(shown) / rate, rng)
    metadata = {
        "total_num_frames": len(shown),
        "fps": rate,
        "duration": len(shown) / rate,
        "frames_indices": indices,
    }
    pixels = np.stack([shown[i].to_ndarray(format="rgb24") for i in indices])
    return Item(scene=scene, pixels=pixels, video_metadata=metadata)


def sample_frames(pts_seconds: np.ndarray, duration_seconds: float, rng: random.Random) -> list[int]:
    """Indices of the frames shown at two frames a second (three times in four) or at 4-8 evenly spaced times."""
    times = np.arange(0, duration_seconds, 1 / SAMPLING_FPS)
    if rng.random() >= SHARE_OF_FPS_POLICY:
        times = np.linspace(0, pts_seconds[-1], rng.randint(MIN_FRAMES, 8))
    elif not MIN_FRAMES <= len(times) <= MAX_FRAMES:
        times = np.linspace(0, pts_seconds[-1], min(max(len(times), MIN_FRAMES), MAX_FRAMES))
    return (np.searchsorted(pts_seconds, times + 1e-6, side="right") - 1).tolist()


def training_items(kind: Kind, count: int, rng: random.Random) -> Iterable[Item]:
    """Items of random scenes that are not held out, formats and codecs drawn by weight."""
    seen = sorted(set(scenes.all_scenes(kind)) - scenes.held_out(kind))
    for _ in range(count):
        scene = rng.choice(seen)
        if kind == "image":
            yield image_item(scene, _weighted(IMAGE_FORMAT_WEIGHTS, rng), rng)
        else:
            yield clip_item(scene, _weighted(VIDEO_CODEC_WEIGHTS, rng), rng)


def held_out_items(kind: Kind, rng: random.Random) -> Iterable[Item]:
    """Every held-out scene once in each format or codec."""
    for scene in sorted(scenes.held_out(kind)):
        if kind == "image":
            yield from (image_item(scene, format, rng) for format in media.IMAGE_FORMATS)
        else:
            yield from (clip_item(scene, codec, rng) for codec in media.VIDEO_CODECS)


def _weighted(weights: dict[Any, float], rng: random.Random) -> Any:
    return rng.choices(list(weights), list(weights.values()))[0]


def prompt(processor: Qwen3VLProcessor, kind: Kind, question: str) -> str:
    """The chat prompt for one media item and one question, up to where the answer begins."""
    content = [{"type": kind}, {"type": "text", "text": question}]
    return processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )


def process(processor: Qwen3VLProcessor, items: Sequence[Item], question: str) -> dict[str, torch.Tensor]:
    """The processor's own inputs for a left-padded batch of items of one kind."""
    kind = items[0].scene.kind
    texts = [prompt(processor, kind, question)] * len(items)
    pixels = [item.pixels for item in items]
    if kind == "image":
        return processor(text=texts, images=pixels, padding=True, return_tensors="pt")
    videos_kwargs = {
        # The processor appends to the indices of an odd number of frames, so it gets its own copy.
        "video_metadata": [
            {**item.video_metadata, "frames_indices": list(item.video_metadata["frames_indices"])} for item in items
        ],
        "do_sample_frames": False,
    }
    inputs = processor(text=texts, videos=pixels, videos_kwargs=videos_kwargs, padding=True, return_tensors="pt")
    inputs.pop("video_metadata", None)
    return inputs


def example(processor: Qwen3VLProcessor, item: Item) -> Example:
    """The item's shared prefix and patches."""
    kind = item.scene.kind
    inputs = process(processor, [item], scenes.DESCRIBE)
    ids = inputs["input_ids"][0]
    end = processor.tokenizer.convert_tokens_to_ids(VISION_END)
    length = int((ids == end).nonzero()[-1]) + 1
    normalised = inputs["pixel_values" if kind == "image" else "pixel_values_videos"]
    return Example(
        scene=item.scene,
        prefix=ids[:length].clone(),
        token_types=inputs["mm_token_type_ids"][0, :length].to(torch.int32),
        grid=inputs[f"{kind}_grid_thw"],
        # Exact: the processor resizes in uint8, then maps 0-255 to -1-1.
        patches=((normalised + 1) * 127.5).round().to(torch.uint8),
    )


def build_pool(
    processor: Qwen3VLProcessor, images: int, clips: int, checks: int, seed: int
) -> dict[str, list[Example]]:
    """`image` and `video` to train on; `image_check` and `video_check` (seen scenes) to watch the training."""
    rng = random.Random(seed)
    counts: list[tuple[str, Kind, int]] = [
        ("image", "image", images),
        ("video", "video", clips),
        ("image_check", "image", checks),
        ("video_check", "video", checks),
    ]
    return {
        name: [example(processor, item) for item in training_items(kind, count, rng)] for name, kind, count in counts
    }
