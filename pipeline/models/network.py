"""The size of a network, as its configuration and weights say it."""

from __future__ import annotations

from typing import Any

from pipeline.planning.estimate import Network


def network_of(config: Any, parameters: int) -> Network:
    """Of a tower or a language model. Without attention (`layers` 0) where the configuration names no layers of heads,
    as of convolutional networks."""
    layers = getattr(config, "num_hidden_layers", None) or getattr(config, "depth", None)
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "num_heads", None)
    if not isinstance(layers, int) or not isinstance(heads, int):
        return Network(parameters=parameters)
    head_size = getattr(config, "head_dim", None)
    # Qwen2-VL calls `hidden_size` what leaves its tower, and `embed_dim` the tower's own width.
    width = getattr(config, "embed_dim", None) or (heads * head_size if head_size else config.hidden_size)
    return Network(parameters=parameters, layers=layers, width=width)
