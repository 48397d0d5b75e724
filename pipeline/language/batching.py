"""Batches of prompts by what prefill and decoding will hold in memory. Pure.

A request's key-value cache takes 2 * L * N * n_kv * d_h * b bytes: layers, tokens (prompt and output limit), key-value
heads, head size, bytes a number.
"""

from __future__ import annotations

from collections.abc import Sequence


def plan_language_batches(
    prompt_lengths: Sequence[int],
    *,
    max_new_tokens: int,
    kv_bytes_per_token: int,
    max_batch_bytes: int,
    max_batch_items: int,
) -> list[list[int]]:
    """Positions grouped into batches, longest prompts first, similar lengths together.

    A batch of n prompts padded to the longest costs n * (longest + max_new_tokens) * kv_bytes_per_token bytes. A prompt
    above the budget by itself is alone in its batch.
    """
    order = sorted(range(len(prompt_lengths)), key=lambda position: (-prompt_lengths[position], position))
    batches: list[list[int]] = []
    room = 0
    for position in order:
        if room == 0:
            demand = (prompt_lengths[position] + max_new_tokens) * kv_bytes_per_token
            room = max(1, min(max_batch_items, max_batch_bytes // demand))
            batches.append([])
        batches[-1].append(position)
        room -= 1
    return batches
