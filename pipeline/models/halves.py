"""Loads one half of a vision-language checkpoint: tower and projector, or the language model.

The class transformers would load is subclassed so that the other half's modules are gone before any weight is read:
the library then maps names, casts and builds buffers as always, and the unread half costs neither memory nor I/O.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from pipeline.errors import ConfigError

Half = Literal["encoder", "language"]


def load_half(path: str, half: Half, *, dtype: str, device: str, attention: str | None = None) -> PreTrainedModel:
    """The model with only `half` in memory, in evaluation mode on `device`.

    Raises `ConfigError` when transformers has no image-text-to-text class for the checkpoint, and `RuntimeError` when
    a weight the half needs is missing from the checkpoint (transformers would fill it with random numbers).
    """
    config = AutoConfig.from_pretrained(path)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "output_loading_info": True}
    if attention is not None:
        options["attn_implementation"] = attention
    half_class: Any = _half_class(config, half)
    model, info = half_class.from_pretrained(path, config=config, **options)
    if info["missing_keys"]:
        raise RuntimeError(f"model {path}: weights missing for its {half} half: {sorted(info['missing_keys'])[:5]}")
    return model.to(device).eval()  # type: ignore[no-any-return]


def count_parameters(path: str) -> dict[str, int]:
    """How many numbers the weights of each half are. Reads no weights. Raises `ConfigError` as `load_half` does."""
    config = AutoConfig.from_pretrained(path)
    halves: tuple[Half, ...] = ("encoder", "language")
    with torch.device("meta"):
        models = {half: _half_class(config, half)(config) for half in halves}
    return {half: sum(weight.numel() for weight in model.parameters()) for half, model in models.items()}


def _half_class(config: Any, half: Half) -> type[PreTrainedModel]:
    mapping: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) not in mapping:
        raise ConfigError(
            f"model {config.name_or_path}: {config.model_type!r} is not an image-text-to-text architecture"
        )
    whole = mapping[type(config)]

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, config, *args, **kwargs)
        _drop_other_half(self, half)
        self._keys_to_ignore_on_load_unexpected = {".*"}
        if half == "encoder":
            self.all_tied_weights_keys = {}

    # The name stays: transformers looks up generation settings and conversions by it.
    return type(whole.__name__, (whole,), {"__init__": __init__, "__module__": whole.__module__})


def _drop_other_half(model: Any, half: Half) -> None:
    decoder = model.get_decoder()
    if decoder is None or decoder is model or decoder is model.base_model:
        raise ConfigError(f"{type(model).__name__} does not keep its language model apart from its vision tower")
    if half == "encoder":
        # The head first: looking it up goes through the decoder.
        for part in (model.get_output_embeddings(), decoder):
            if part is not None:
                _remove(model, part)
        return
    for name, child in list(model.base_model.named_children()):
        if child is not decoder and any(True for _ in child.parameters()):
            setattr(model.base_model, name, None)


def _remove(model: nn.Module, target: nn.Module) -> None:
    for parent in model.modules():
        for name, child in list(parent.named_children()):
            if child is target:
                setattr(parent, name, None)
