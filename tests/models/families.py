"""Tiny checkpoints with random weights, built from the real configuration and processor classes of seven families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from pipeline.models.location import resolve_model

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}IMAGE{% elif c['type'] == 'video' %}VIDEO{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIDE = {"height": 56, "width": 56}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT: dict[str, Any] = {**VISION, "num_key_value_heads": 1, "max_position_embeddings": 4096, "initializer_range": 0.3}


def tokenizer(**named: str) -> Any:
    """The demo model's tokenizer with more special tokens, each also an attribute of that name."""
    made = hf.AutoTokenizer.from_pretrained(resolve_model("demo:captioner"), extra_special_tokens=named)
    made.model_max_length = 100_000
    return made


def _text(tokens: Any, **changes: Any) -> dict[str, Any]:
    ids = {"eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id, "bos_token_id": None}
    return {**TEXT, "vocab_size": len(tokens), **ids, **changes}


def _ids(tokens: Any, **named: str) -> dict[str, int]:
    return {name: tokens.convert_tokens_to_ids(token) for name, token in named.items()}


def llava_onevision() -> tuple[Any, Any, dict[str, str]]:
    names = {"image_token": "<image>", "video_token": "<video>"}
    tokens = tokenizer(**names)
    pinpoints = [[56, 112], [112, 56], [112, 112]]
    processor = hf.LlavaOnevisionProcessor(
        image_processor=hf.LlavaOnevisionImageProcessor(size=SIDE, image_grid_pinpoints=pinpoints),
        video_processor=hf.LlavaOnevisionVideoProcessor(size=SIDE),
        tokenizer=tokens,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        **names,
    )
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(**VISION, image_size=56, patch_size=14, vision_use_head=False),
        text_config=hf.Qwen2Config(**_text(tokens)),
        image_grid_pinpoints=pinpoints,
        vision_feature_select_strategy="full",
        **_ids(tokens, image_token_id="<image>", video_token_id="<video>"),
    )
    return hf.LlavaOnevisionForConditionalGeneration, (config, processor), names


def _clip(tokens: Any) -> dict[str, Any]:
    """What the configurations of LLaVA and LLaVA-NeXT have in common."""
    return {
        "vision_config": hf.CLIPVisionConfig(**VISION, image_size=56, patch_size=14),
        "text_config": hf.LlamaConfig(**_text(tokens)),
        "vision_feature_layer": -1,
        **_ids(tokens, image_token_index="<image>"),
    }


def _clip_processor(tokens: Any, images: Any, kind: Any) -> Any:
    return kind(
        image_processor=images,
        tokenizer=tokens,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )


def llava() -> tuple[Any, Any, dict[str, str]]:
    tokens = tokenizer(image_token="<image>")
    images = hf.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=SIDE)
    processor = _clip_processor(tokens, images, hf.LlavaProcessor)
    config = hf.LlavaConfig(**_clip(tokens))
    return hf.LlavaForConditionalGeneration, (config, processor), {"image_token": "<image>"}


def llava_next() -> tuple[Any, Any, dict[str, str]]:
    tokens = tokenizer(image_token="<image>")
    pinpoints = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
    images = hf.LlavaNextImageProcessor(size={"shortest_edge": 56}, crop_size=SIDE, image_grid_pinpoints=pinpoints)
    processor = _clip_processor(tokens, images, hf.LlavaNextProcessor)
    config = hf.LlavaNextConfig(**_clip(tokens), image_grid_pinpoints=pinpoints)
    return hf.LlavaNextForConditionalGeneration, (config, processor), {"image_token": "<image>"}


def internvl() -> tuple[Any, Any, dict[str, str]]:
    tokens = tokenizer(
        context_image_token="<IMG_CONTEXT>",
        start_image_token="<img>",
        end_image_token="</img>",
        video_token="<video>",
    )
    processor = hf.InternVLProcessor(
        image_processor=hf.GotOcr2ImageProcessor(size=SIDE, crop_to_patches=True, max_patches=4),
        video_processor=hf.InternVLVideoProcessor(size=SIDE),
        tokenizer=tokens,
        image_seq_length=4,
    )
    config = hf.InternVLConfig(
        vision_config=hf.InternVLVisionConfig(**VISION, image_size=[56, 56], patch_size=[14, 14]),
        text_config=hf.Qwen2Config(**_text(tokens)),
        image_seq_length=4,
        **_ids(tokens, image_token_id="<IMG_CONTEXT>"),
    )
    names = {"image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    return hf.InternVLForConditionalGeneration, (config, processor), names


def idefics3() -> tuple[Any, Any, dict[str, str]]:
    rows = {f"row_{i}_col_{j}": f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5)}
    tokens = tokenizer(
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
        **rows,
    )
    processor = hf.Idefics3Processor(
        image_processor=hf.Idefics3ImageProcessor(size={"longest_edge": 112}, max_image_size={"longest_edge": 56}),
        tokenizer=tokens,
        image_seq_len=4,
    )
    config = hf.Idefics3Config(
        vision_config={**VISION, "image_size": 56, "patch_size": 14},
        text_config=hf.LlamaConfig(**_text(tokens)),
        scale_factor=2,
        **_ids(tokens, image_token_id="<image>"),
    )
    return hf.Idefics3ForConditionalGeneration, (config, processor), {"image_token": "<image>"}


def gemma3() -> tuple[Any, Any, dict[str, str]]:
    tokens = tokenizer(image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>")
    processor = hf.Gemma3Processor(
        image_processor=hf.Gemma3ImageProcessor(size=SIDE), tokenizer=tokens, image_seq_length=4
    )
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**VISION, image_size=56, patch_size=14, vision_use_head=False),
        text_config=hf.Gemma3TextConfig(**_text(tokens, head_dim=16, query_pre_attn_scalar=16, sliding_window=64)),
        mm_tokens_per_image=4,
        tie_word_embeddings=False,  # tied, random weights repeat the last token for ever
        **_ids(
            tokens,
            image_token_id="<image_soft_token>",
            boi_token_id="<start_of_image>",
            eoi_token_id="<end_of_image>",
        ),
    )
    return hf.Gemma3ForConditionalGeneration, (config, processor), {"image_token": "<start_of_image>"}


def qwen2_5_vl() -> tuple[Any, Any, dict[str, str]]:
    tokens = tokenizer()
    size = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    processor = hf.Qwen2_5_VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(size=size),
        video_processor=hf.Qwen2VLVideoProcessor(size=size, cap_pixels_per_frame=False),
        tokenizer=tokens,
    )
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = hf.Qwen2_5_VLConfig(
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
            "window_size": 56,
        },
        text_config=_text(tokens, rope_parameters=rope),
        **_ids(
            tokens,
            image_token_id="<|image_pad|>",
            video_token_id="<|video_pad|>",
            vision_start_token_id="<|vision_start|>",
            vision_end_token_id="<|vision_end|>",
        ),
    )
    names = {
        "image_token": "<|vision_start|><|image_pad|><|vision_end|>",
        "video_token": "<|vision_start|><|video_pad|><|vision_end|>",
    }
    return hf.Qwen2_5_VLForConditionalGeneration, (config, processor), names


FAMILIES: dict[str, Callable[[], tuple[Any, Any, dict[str, str]]]] = {
    "llava": llava,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "internvl": internvl,
    "idefics3": idefics3,
    "gemma3": gemma3,
    "qwen2_5_vl": qwen2_5_vl,
}


def save_family(name: str, folder: Path) -> Path:
    """Writes the family's checkpoint with its processor; weights are random from a seed."""
    kind, (config, processor), names = FAMILIES[name]()
    torch.manual_seed(5)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # Gemma 3's projector starts at nought, and the image would not be seen
                parameter.normal_(std=0.3)
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    processor.chat_template = TEMPLATE.replace("IMAGE", names["image_token"]).replace(
        "VIDEO", names.get("video_token", "")
    )
    processor.tokenizer.padding_side = "left"
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
