"""Tiny dual encoders with random weights, built from the real configurations and processors of three families."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ["a", "red", "green", "circle", "square", "of", "and", "the", "mill", "wheel", "turns", "in", "water"]
TEXTS = ["a red circle", "water", "the mill wheel turns in the water " * 4, "", "a green square and a red circle"]
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}


def _tokenizer(**options: Any) -> Any:
    # The end must not be id 2: CLIP then pools at the highest token id.
    special = ["<pad>", "<unk>", "<bos>", "<eos>"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 3)]
    )
    named = {name: f"<{name.removesuffix('_token')}>" for name in ("pad_token", "unk_token", "bos_token", "eos_token")}
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, **named, **options)


def _text(tokenizer: Any) -> dict[str, Any]:
    return {**TEXT, "vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}


def clip(**image_options: Any) -> tuple[Any, Any]:
    """Projections of another size than the towers, and than their configurations say."""
    tokenizer = _tokenizer(model_max_length=16)
    images = hf.CLIPImageProcessor(
        **{"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}} | image_options
    )
    config = hf.CLIPConfig(
        text_config=_text(tokenizer), vision_config=VISION, projection_dim=24, initializer_factor=3.0
    )
    return _random(hf.CLIPModel, config), hf.CLIPProcessor(image_processor=images, tokenizer=tokenizer)


def siglip() -> tuple[Any, Any]:
    """Its tokenizer gives no mask, so padding is text to the model."""
    tokenizer = _tokenizer(model_input_names=["input_ids"])
    images = hf.SiglipImageProcessor(size={"height": 32, "width": 32})
    config = hf.SiglipConfig(text_config=_text(tokenizer), vision_config=VISION)
    return _random(hf.SiglipModel, config), hf.SiglipProcessor(image_processor=images, tokenizer=tokenizer)


def siglip2() -> tuple[Any, Any]:
    """NaFlex: any grid of up to 20 patches, on a table of 4 x 4 positions; its tokenizer as checkpoints set it."""
    return _siglip2(padding_side="right", model_input_names=["input_ids"])


def siglip2_masked() -> tuple[Any, Any]:
    """Its tokenizer as the class is: padded on the left, under a mask."""
    return _siglip2()


def _siglip2(**options: Any) -> tuple[Any, Any]:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    vocabulary = [*special, "▁", *string.ascii_lowercase]
    tokenizer = hf.Siglip2Tokenizer(vocab={piece: i for i, piece in enumerate(vocabulary)}, **options)
    images = hf.Siglip2ImageProcessor(patch_size=8, max_num_patches=20)
    vision = {name: value for name, value in VISION.items() if name != "image_size"}
    config = hf.Siglip2Config(text_config=_text(tokenizer), vision_config={**vision, "num_patches": 16})
    return _random(hf.Siglip2Model, config), hf.Siglip2Processor(image_processor=images, tokenizer=tokenizer)


FAMILIES = {"clip": clip, "siglip": siglip, "siglip2": siglip2, "siglip2_masked": siglip2_masked}


def _random(kind: Any, config: Any) -> Any:
    torch.manual_seed(9)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def save_dual(folder: Path, model: Any, processor: Any) -> Path:
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
