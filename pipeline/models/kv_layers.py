"""Reads off a model's configuration what each layer of its language model keeps of a token."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import get_layer_types_and_kwargs

from pipeline.language.kv_cache import KvCache, LayerCache, attention_bytes

NUMBER_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_RECURRENT = ("linear_attention", "conv")


def read_kv_cache(config: Any, dtype: str) -> KvCache:
    """Of the text model in `config`, as transformers' `DynamicCache` keeps it in `dtype`.

    Layer types, windows and layers that share are those that `DynamicCache` itself is built from. What the states of
    linear attention take is known of gated delta nets (Qwen3-Next, Qwen3.5) and of short convolutions (LFM2); of others
    it counts as nothing.
    """
    text = config.get_text_config(decoder=True)
    types, options = get_layer_types_and_kwargs(text)
    layers = zip(types, options, text.per_layer_config, strict=True)
    return KvCache.of_layers(_layer(kind, kwargs.get("sliding_window"), own, dtype) for kind, kwargs, own in layers)


def _layer(kind: str, window: int | None, config: Any, dtype: str) -> LayerCache:
    if kind == "dummy":
        return LayerCache()
    state = _state_bytes(kind, config, NUMBER_BYTES[dtype])
    if kind in _RECURRENT:
        return LayerCache(state_bytes=state)
    return LayerCache(token_bytes=_token_bytes(kind, config, NUMBER_BYTES[dtype]), window=window, state_bytes=state)


def _token_bytes(kind: str, config: Any, number_bytes: int) -> int:
    latent = getattr(config, "kv_lora_rank", None)
    if latent:  # one latent beside one rotary key, for all heads
        sizes = {"num_heads": 1, "key_size": latent, "value_size": config.qk_rope_head_dim}
    else:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        sizes = {"num_heads": heads, "key_size": size, "value_size": size}
    indexed = config.index_head_dim * number_bytes if kind == "indexed_attention" else 0
    return attention_bytes(**sizes, number_bytes=number_bytes) + indexed


def _state_bytes(kind: str, config: Any, number_bytes: int) -> int:
    if kind == "conv" and hasattr(config, "conv_L_cache"):
        return int(config.hidden_size * config.conv_L_cache * number_bytes)
    if kind == "linear_attention" and hasattr(config, "linear_num_value_heads"):
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        window = (2 * keys + values) * config.linear_conv_kernel_dim * number_bytes
        return int(window + values * config.linear_key_head_dim * NUMBER_BYTES["float32"])
    return 0
