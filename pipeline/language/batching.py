"""Batches of texts by their padded tokens, of prompts by what prefill and decoding will hold in memory. Pure.

A request's key-value cache takes 2 * L * N * n_kv * d_h * b bytes: layers, tokens (prompt and output limit), key-value
heads, head size, bytes a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
# A core is as fast with 512 tokens at a time as with 4,096, and with 256 some 5 to 10 % slower (AMD EPYC,
# all-MiniLM-L6-v2). A GPU wants thousands: not measured.
RUN_TOKENS = {"cpu": 512, "cuda": 4_096}


# Padded tokens a batch of texts, where the configuration leaves them to the device. Measured on one core (AMD EPYC,
# all-MiniLM-L6-v2, 16 to 256 tokens a text): from 512 to 4,096 within 5 %, 16,384 cost 8 to 20 % more a token. A GPU
# wants more at a time: not measured.
TEXT_BATCH_TOKENS = {"cpu": 4_096, "cuda": 16_384}


def plan_text_batches(lengths: Sequence[int], *, max_batch_tokens: int, max_batch_items: int) -> list[list[int]]:
    """Positions of texts of `lengths` tokens grouped into batches, longest first, similar lengths together.

    A batch of n texts padded to its longest costs n * longest tokens. A text above the budget by itself is alone in its
    batch. `in_input_order` brings results back into the order of `lengths`.
    """
    order = sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))
    batches: list[list[int]] = []
    room = 0
    for position in order:
        if room == 0:
            room = max(1, min(max_batch_items, max_batch_tokens // max(1, lengths[position])))
            batches.append([])
        batches[-1].append(position)
        room -= 1
    return batches


def length_runs(lengths: Sequence[int], *, least_tokens: int) -> list[slice]:
    """Stretches of a batch of texts, longest first, that are computed one after another, each padded to its longest.

    A stretch ends where the next text has less than 95 % of its longest's tokens, if it has `least_tokens` by then.
    """
    starts = [0]
    for position, length in enumerate(lengths):
        longest = lengths[starts[-1]]
        if length < 0.95 * longest and (position - starts[-1]) * longest >= least_tokens:
            starts.append(position)
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(lengths)], strict=True)]


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
    return plan_text_batches(
        [length + max_new_tokens for length in prompt_lengths],
        max_batch_tokens=max_batch_bytes // kv_bytes_per_token,
        max_batch_items=max_batch_items,
    )


def in_input_order(batches: Iterable[Sequence[int]], results: Iterable[Sequence[T]]) -> list[T]:
    """The results of batches of positions, one a position, by position.

    Raises `ValueError` when the positions are not 0 to their number - 1, each once, or results are missing or over.
    """
    pairs = [pair for batch, values in zip(batches, results, strict=True) for pair in zip(batch, values, strict=True)]
    by_position = dict(pairs)
    if len(by_position) != len(pairs) or by_position.keys() != set(range(len(pairs))):
        raise ValueError(f"{len(pairs)} results are not for the positions 0 to {len(pairs) - 1}, each once")
    return [by_position[position] for position in range(len(pairs))]
