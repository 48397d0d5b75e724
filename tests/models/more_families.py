"""More tiny checkpoints as in `families.py`, of families that differ from those in how they batch."""

from __future__ import annotations

from typing import Any

import transformers as hf

from tests.models.families import SIDE, VISION, _ids, _text, tokenizer

_CLIP = {**VISION, "image_size": 56, "patch_size": 14}


def llava_next() -> tuple[Any, Any, dict[str, str]]:
    tokens = tokenizer(image_token="<image>")
    pinpoints = [[56, 112], [112, 56], [112, 112]]
    processor = hf.LlavaNextProcessor(
        image_processor=hf.LlavaNextImageProcessor(
            size={"shortest_edge": 56}, crop_size=SIDE, image_grid_pinpoints=pinpoints
        ),
        tokenizer=tokens,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    config = hf.LlavaNextConfig(
        vision_config=hf.CLIPVisionConfig(**_CLIP),
        text_config=hf.LlamaConfig(**_text(tokens)),
        image_grid_pinpoints=pinpoints,
        **_ids(tokens, image_token_id="<image>"),
    )
    return hf.LlavaNextForConditionalGeneration, (config, processor), {"image_token": "<image>"}


def mistral3() -> tuple[Any, Any, dict[str, str]]:
    tokens = tokenizer(image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]")
    processor = hf.PixtralProcessor(
        image_processor=hf.PixtralImageProcessor(size={"longest_edge": 112}, patch_size={"height": 14, "width": 14}),
        tokenizer=tokens,
        patch_size=14,
        spatial_merge_size=2,
    )
    config = hf.Mistral3Config(
        vision_config=hf.PixtralVisionConfig(**VISION, image_size=112, patch_size=14),
        text_config=hf.MistralConfig(**_text(tokens)),
        spatial_merge_size=2,
        **_ids(tokens, image_token_id="[IMG]"),
    )
    return hf.Mistral3ForConditionalGeneration, (config, processor), {"image_token": "[IMG]"}


MORE_FAMILIES = {"llava_next": llava_next, "mistral3": mistral3}
