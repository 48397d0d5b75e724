"""Processors with the settings that published checkpoints have, around the demo model's tokenizer; no weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from pipeline.models.vision_language import VisionLanguageFacts
from tests.models.families import tokenizer

hf: Any = transformers  # its constructors are not all typed


def _facts(name: str, processor: Any, config: Any) -> VisionLanguageFacts:
    return VisionLanguageFacts(model=name, processor=processor, config=config)


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _id(tokens: Any, token: str) -> int:
    return int(tokens.convert_tokens_to_ids(token))


def llava_1_5() -> VisionLanguageFacts:
    """llava-1.5-7b-hf: a CLIP ViT-L/14 of 336 pixels, without the class token."""
    tokens = tokenizer(image_token="<image>")
    images = hf.CLIPImageProcessor(size={"shortest_edge": 336}, crop_size=_square(336))
    processor = hf.LlavaProcessor(
        image_processor=images,
        tokenizer=tokens,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return _facts("llava-1.5", processor, hf.LlavaConfig(image_token_id=_id(tokens, "<image>")))


def llava_next() -> VisionLanguageFacts:
    """llava-v1.6-mistral-7b-hf."""
    tokens = tokenizer(image_token="<image>")
    pinpoints = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    images = hf.LlavaNextImageProcessor(
        size={"shortest_edge": 336}, crop_size=_square(336), image_grid_pinpoints=pinpoints
    )
    processor = hf.LlavaNextProcessor(
        image_processor=images,
        tokenizer=tokens,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return _facts("llava-next", processor, hf.LlavaNextConfig(image_token_id=_id(tokens, "<image>")))


def llava_onevision() -> VisionLanguageFacts:
    """llava-onevision-qwen2-7b-ov-hf: 36 resolutions of up to six by six tiles of 384 pixels."""
    tokens = tokenizer(image_token="<image>", video_token="<video>")
    sides = [384 * n for n in range(1, 7)]
    pinpoints = [[height, width] for height in sides for width in sides]
    processor = hf.LlavaOnevisionProcessor(
        image_processor=hf.LlavaOnevisionImageProcessor(size=_square(384), image_grid_pinpoints=pinpoints),
        video_processor=hf.LlavaOnevisionVideoProcessor(size=_square(384)),
        tokenizer=tokens,
        num_image_tokens=729,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
    )
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(image_size=384, patch_size=14),
        image_token_id=_id(tokens, "<image>"),
        video_token_id=_id(tokens, "<video>"),
    )
    return _facts("llava-onevision", processor, config)


def internvl() -> VisionLanguageFacts:
    """InternVL3-1B-hf: up to 12 tiles of 448 pixels and 256 features."""
    names = {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"}
    tokens = tokenizer(**names, video_token="<video>")
    processor = hf.InternVLProcessor(
        image_processor=hf.GotOcr2ImageProcessor(
            size=_square(448), crop_to_patches=False, min_patches=1, max_patches=12
        ),
        video_processor=hf.InternVLVideoProcessor(size=_square(448)),
        tokenizer=tokens,
        image_seq_length=256,
    )
    return _facts("internvl", processor, hf.InternVLConfig(image_token_id=_id(tokens, "<IMG_CONTEXT>")))


def _row_and_column_tokens() -> dict[str, str]:
    return {f"row_{i}_col_{j}": f"<row_{i}_col_{j}>" for i in range(1, 13) for j in range(1, 13)}


def idefics3(longest_edge: int = 4 * 364) -> VisionLanguageFacts:
    """Idefics3-8B-Llama3."""
    tokens = tokenizer(image_token="<image>", **_row_and_column_tokens())
    images = hf.Idefics3ImageProcessor(
        size={"longest_edge": longest_edge}, max_image_size={"longest_edge": 364}, resample=3
    )
    config = hf.Idefics3Config(
        vision_config={"image_size": 364, "patch_size": 14}, image_token_id=_id(tokens, "<image>")
    )
    return _facts("idefics3", hf.Idefics3Processor(image_processor=images, tokenizer=tokens), config)


def smolvlm() -> VisionLanguageFacts:
    """SmolVLM-Instruct: 384 pixels a tile and 81 features. Its videos need a package that is not installed here."""
    tokens = tokenizer(image_token="<image>", **_row_and_column_tokens())
    images = hf.SmolVLMImageProcessor(size={"longest_edge": 1536}, max_image_size={"longest_edge": 384}, resample=3)
    config = hf.SmolVLMConfig(
        vision_config={"image_size": 384, "patch_size": 14}, image_token_id=_id(tokens, "<image>")
    )
    processor = hf.Idefics3Processor(image_processor=images, tokenizer=tokens, image_seq_len=81)
    return _facts("smolvlm", processor, config)


def gemma3() -> VisionLanguageFacts:
    """gemma-3-4b-it: 4,096 patches pooled to 256 features."""
    tokens = tokenizer(image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>")
    processor = hf.Gemma3Processor(
        image_processor=hf.Gemma3ImageProcessor(size=_square(896)), tokenizer=tokens, image_seq_length=256
    )
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(image_size=896, patch_size=14),
        image_token_id=_id(tokens, "<image_soft_token>"),
    )
    return _facts("gemma3", processor, config)


def qwen2_vl(capped: bool = False) -> VisionLanguageFacts:
    """Qwen2-VL-7B-Instruct, whose videos have other bounds than its images."""
    return _qwen2(hf.Qwen2VLProcessor, hf.Qwen2VLConfig, capped)


def qwen2_5_vl() -> VisionLanguageFacts:
    """Qwen2.5-VL-7B-Instruct, as a newer qwen-vl-utils sizes its videos."""
    return _qwen2(hf.Qwen2_5_VLProcessor, hf.Qwen2_5_VLConfig, capped=True)


def _qwen2(kind: Any, config: Any, capped: bool) -> VisionLanguageFacts:
    tokens = tokenizer()
    processor = kind(
        image_processor=hf.Qwen2VLImageProcessor(size={"shortest_edge": 3136, "longest_edge": 12845056}),
        video_processor=hf.Qwen2VLVideoProcessor(
            size={"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}, cap_pixels_per_frame=capped
        ),
        tokenizer=tokens,
    )
    ids = {"image_token_id": _id(tokens, "<|image_pad|>"), "video_token_id": _id(tokens, "<|video_pad|>")}
    return _facts("qwen2", processor, config(**ids))


PUBLISHED: dict[str, Callable[[], VisionLanguageFacts]] = {
    "llava_1_5": llava_1_5,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "internvl": internvl,
    "idefics3": idefics3,
    "smolvlm": smolvlm,
    "gemma3": gemma3,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
}
