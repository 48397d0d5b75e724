"""Tiny image classifiers with random weights, built from the real configurations and processors of their families."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf

VIT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
SQUARE = {"height": 32, "width": 32}
EDGE = {"shortest_edge": 32}
Made = tuple[Any, Any]


def _made(network: Any, config: Any, processor: Any) -> Made:
    torch.manual_seed(9)
    model = network(config)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d)]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:  # so that what the image shows reaches the head through any depth
                parameter.normal_(std=1 / math.sqrt(parameter[0].numel()))
            else:
                parameter.normal_(mean=float("norm" in name and name.endswith("weight")), std=0.1)
        if norms:
            for norm in norms:
                norm.momentum = None
            noise = np.random.default_rng(1).integers(0, 256, (16, 50, 70, 3), dtype=np.uint8)
            model.train()(**processor(images=list(noise), return_tensors="pt"))
    model.eval()
    return model, processor


def labelled(num_labels: int = 3, **options: Any) -> dict[str, Any]:
    """Options of any configuration."""
    names = {number: f"kind {number}" for number in range(num_labels)}
    return {"id2label": names, "label2id": {name: number for number, name in names.items()}, **options}


def vit(**options: Any) -> Made:
    """Every image to one size, bilinear."""
    return vit_sized(hf.ViTImageProcessor(size=SQUARE), **options)


def vit_sized(processor: Any, **options: Any) -> Made:
    """The same network behind another processor."""
    return _made(hf.ViTForImageClassification, hf.ViTConfig(**VIT, **labelled(**options)), processor)


def deit() -> Made:
    """To one size, and the middle of it."""
    processor = hf.DeiTImageProcessor(size={"height": 40, "width": 40}, crop_size=SQUARE)
    return _made(hf.DeiTForImageClassification, hf.DeiTConfig(**VIT, **labelled()), processor)


def beit() -> Made:
    """Without a crop, and with relative positions."""
    config = hf.BeitConfig(**VIT, use_relative_position_bias=True, **labelled())
    return _made(hf.BeitForImageClassification, config, hf.BeitImageProcessor(size=SQUARE))


def convnext(**options: Any) -> Made:
    """The shortest edge to 32 / 0.875, and the middle of it."""
    config = hf.ConvNextConfig(hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], image_size=32, **labelled(**options))
    return _made(hf.ConvNextForImageClassification, config, hf.ConvNextImageProcessor(size=EDGE))


def resnet() -> Made:
    """ConvNeXt's processor at 384, which warps; a batch norm."""
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], **labelled())
    processor = hf.ConvNextImageProcessor(size={"shortest_edge": 384}, resample=2)
    return _made(hf.ResNetForImageClassification, config, processor)


def dinov2() -> Made:
    """The shortest edge to 40, and the middle of it, bicubic."""
    config = hf.Dinov2Config(**{**VIT, "mlp_ratio": 2}, **labelled())
    return _made(
        hf.Dinov2ForImageClassification, config, hf.BitImageProcessor(size={"shortest_edge": 40}, crop_size=SQUARE)
    )


def mobilenet() -> Made:
    """Bilinear."""
    config = hf.MobileNetV2Config(depth_multiplier=0.25, image_size=32, **labelled())
    processor = hf.MobileNetV2ImageProcessor(size={"shortest_edge": 40}, crop_size=SQUARE)
    return _made(hf.MobileNetV2ForImageClassification, config, processor)


def mobilevit() -> Made:
    """Blue before red, and no mean or deviation."""
    config = hf.MobileViTConfig(
        hidden_sizes=[16, 16, 16], neck_hidden_sizes=[4, 4, 8, 8, 8, 16, 32], image_size=64, **labelled()
    )
    processor = hf.MobileViTImageProcessor(size={"shortest_edge": 72}, crop_size={"height": 64, "width": 64})
    return _made(hf.MobileViTForImageClassification, config, processor)


def levit() -> Made:
    """The shortest edge to 256 / 224 of what is said."""
    config = hf.LevitConfig(
        image_size=64,
        hidden_sizes=[16, 16, 16],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        **labelled(),
    )
    processor = hf.LevitImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64})
    return _made(hf.LevitForImageClassification, config, processor)


def poolformer() -> Made:
    """The shortest edge to 32 / 0.9."""
    config = hf.PoolFormerConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], **labelled())
    return _made(hf.PoolFormerForImageClassification, config, hf.PoolFormerImageProcessor(size=EDGE, crop_size=SQUARE))


def swin() -> Made:
    """Windows of patches that move."""
    config = hf.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 2], num_heads=[2, 2], window_size=4, **labelled()
    )
    return _made(hf.SwinForImageClassification, config, hf.ViTImageProcessor(size=SQUARE, resample=3))


def clip(**options: Any) -> Made:
    """The tower of a dual encoder, and a head over the mean of its patches."""
    config = hf.CLIPConfig(
        vision_config=VIT, text_config={"hidden_size": 32, "num_hidden_layers": 1}, **labelled(**options)
    )
    return _made(hf.CLIPForImageClassification, config, hf.CLIPImageProcessor(size=EDGE, crop_size=SQUARE))


def siglip() -> Made:
    """Likewise."""
    config = hf.SiglipConfig(vision_config=VIT, text_config={"hidden_size": 32, "num_hidden_layers": 1}, **labelled())
    return _made(hf.SiglipForImageClassification, config, hf.SiglipImageProcessor(size=SQUARE))


def siglip2(**options: Any) -> Made:
    """NaFlex: any grid of up to 20 patches."""
    vision = {name: value for name, value in VIT.items() if name != "image_size"}
    config = hf.Siglip2Config(
        vision_config={**vision, "num_patches": 16},
        text_config={"hidden_size": 32, "num_hidden_layers": 1},
        **labelled(**options),
    )
    return _made(hf.Siglip2ForImageClassification, config, hf.Siglip2ImageProcessor(patch_size=8, max_num_patches=20))


CLASSIFIERS = {
    make.__name__: make
    for make in (
        *(vit, deit, beit, convnext, resnet, dinov2, mobilenet, mobilevit, levit, poolformer, swin),
        *(clip, siglip, siglip2),
    )
}


def save_classifier(folder: Path, model: Any, processor: Any) -> Path:
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
