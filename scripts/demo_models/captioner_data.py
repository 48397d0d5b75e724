"""Training examples and test items of the captioner: drawn, encoded, decoded, sampled and processed as in use."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import Qwen3VLProcessor

from pipeline.demo import scenes
from pipeline.demo.scenes import Kind, Scene
from scripts.demo_models.captioner_build import VISION_END
from scripts.demo_models.items import Item, seen_scenes, training_item

SHARE_OF_FPS_POLICY = 0.75


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


def training_items(kind: Kind, count: int, rng: random.Random) -> Iterable[Item]:
    """Items of random scenes that are not held out; three clips in four at two frames a second."""
    seen = seen_scenes(kind)
    for _ in range(count):
        yield training_item(rng.choice(seen), rng, fps_share=SHARE_OF_FPS_POLICY)


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
