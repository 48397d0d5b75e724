"""Bytes of a request's key-value cache: by the formulas, and as transformers' own `DynamicCache` holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from pipeline.language.kv_cache import KvCache, LayerCache, attention_bytes
from pipeline.models.kv_layers import read_kv_cache
from tests.language.caches import CONFIGS, WINDOW

ROWS = 2


def tensors(cache: hf.DynamicCache) -> list[torch.Tensor]:
    """Everything that the cache's layers hold of the rows."""
    held: list[Any] = []
    for layer in cache.layers:
        held += [getattr(layer, "keys", None), getattr(layer, "values", None)]
        held += [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    return [tensor for tensor in held if tensor is not None]


def in_view(cache: hf.DynamicCache) -> float:
    """Bytes a row that the layers go on with."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(cache)) / ROWS


def in_memory(cache: hf.DynamicCache) -> float:
    """Bytes a row that are kept from being freed: a view keeps all that it is a view of."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors(cache)}
    return sum(storages.values()) / ROWS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_bytes_are_those_of_the_cache_after_prefill_and_a_step(family: str, dtype: str) -> None:
    config = CONFIGS[family]()
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    kv = read_kv_cache(config, dtype)
    for length in (10, 3 * WINDOW):
        cache = hf.DynamicCache(config=config)
        ids = torch.randint(3, 60, (ROWS, length))
        with torch.inference_mode():
            model(input_ids=ids, cache=cache, use_cache=True)
            assert in_view(cache) == kv.kept_bytes(length)
            assert in_memory(cache) == kv.most_bytes(length, 0)
            model(input_ids=ids[:, :1], cache=cache, use_cache=True)
        assert in_view(cache) == kv.kept_bytes(length + 1)


def test_the_field_s_worked_number() -> None:
    config = hf.LlamaConfig(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096)
    kv = read_kv_cache(config, "bfloat16")
    # 2 * 32 layers * 576 tokens * 8 heads * 128 * 2 bytes
    assert kv.kept_bytes(576) == kv.most_bytes(500, 76) == 72 * 2**20
    assert attention_bytes(num_heads=8, key_size=128, value_size=128, number_bytes=2) == 4096


def test_windows_keep_one_less_and_prefill_the_whole_prompt() -> None:
    config = hf.Gemma3TextConfig(num_hidden_layers=12, num_key_value_heads=4, head_dim=256, sliding_window=1024)
    kv = read_kv_cache(config, "bfloat16")
    layer, full, sliding, window = 2 * 4 * 256 * 2, 2, 10, 1024  # every sixth layer attends to everything
    assert kv.kept_bytes(10_000) == layer * (full * 10_000 + sliding * (window - 1))
    assert kv.most_bytes(9_900, 100) == layer * (full + sliding) * 9_900
    assert kv.most_bytes(100, 9_900) == kv.kept_bytes(10_000)


def test_layers_by_hand() -> None:
    layers = [LayerCache(token_bytes=8), LayerCache(token_bytes=4, window=11), LayerCache(token_bytes=4, window=11)]
    kv = KvCache.of_layers([*layers, LayerCache(state_bytes=100), LayerCache()])
    assert kv == KvCache(8, ((10, 8),), 100)
    assert (kv.token_bytes, kv.kept_bytes(5), kv.kept_bytes(50)) == (16, 100 + 5 * 16, 100 + 50 * 8 + 10 * 8)
