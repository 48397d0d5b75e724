"""Tiny configurations from the real classes of families whose key-value caches differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf

WINDOW = 16
BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
MIXED: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
PER_LAYER: dict[str, Any] = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
MIXTURE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA_NET: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**BASE),
    "one head of keys": lambda: hf.LlamaConfig(**{**BASE, "num_key_value_heads": 1}),
    "as many heads of keys": lambda: hf.LlamaConfig(**{**BASE, "num_key_value_heads": None}),
    "qwen3, head size of its own": lambda: hf.Qwen3Config(**BASE, head_dim=24),
    "mistral": lambda: hf.MistralConfig(**BASE, sliding_window=WINDOW),
    # Tied, random weights repeat the last token for ever.
    "gemma3": lambda: hf.Gemma3TextConfig(**BASE, **MIXED, query_pre_attn_scalar=16, tie_word_embeddings=False),
    "gemma3n": lambda: hf.Gemma3nTextConfig(
        **{**BASE, "intermediate_size": [64] * 4},
        **MIXED,
        **PER_LAYER,
        num_kv_shared_layers=2,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "gemma4": lambda: hf.Gemma4TextConfig(**BASE, **MIXED, **PER_LAYER, global_head_dim=32),
    "llama4": lambda: hf.Llama4TextConfig(
        **BASE, head_dim=16, attention_chunk_size=WINDOW, intermediate_size_mlp=64, num_local_experts=2
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **{**BASE, "num_key_value_heads": 4},
        **MIXTURE,
        kv_lora_rank=24,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        first_k_dense_replace=2,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
    ),
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(**BASE, **DELTA_NET),
    "lfm2": lambda: hf.Lfm2Config(**BASE, layer_types=["conv", "conv", "full_attention", "conv"], conv_L_cache=3),
}
