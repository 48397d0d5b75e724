"""Batches of texts by their padded tokens, of prompts by what prefill and decoding will hold in memory. Pure.

A request's key-value cache takes 2 * L * N * n_kv * d_h * b bytes (`pipeline.language.kv_cache`) of prompt, padding and
output limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from pipeline.language.kv_cache import KvCache

# Of what prefill computes for a window, how much may be padding; and how many padded tokens one more batch must save,
# since it costs a pass over the weights for each token of its longest answer. The latter keeps small windows from
# batches of one; it was not measured.
_MOST_PADDING = 0.1
_LEAST_SAVED = 512
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
    order = _longest_first(lengths)
    rooms = [max(1, min(max_batch_items, max_batch_tokens // max(1, lengths[position]))) for position in order]
    return [order[batch] for batch in _fewest(rooms)]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))


def _fewest(rooms: Sequence[int]) -> list[slice]:
    """As few batches as there can be; one that starts at `i` holds `rooms[i]` at most, which must not fall with `i`."""
    starts = [0] if rooms else []
    while starts and starts[-1] + rooms[starts[-1]] < len(rooms):
        starts.append(starts[-1] + rooms[starts[-1]])
    return _between(starts, len(rooms))


def _between(starts: Sequence[int], stop: int) -> list[slice]:
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], stop], strict=True)] if starts else []


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
    kv_bytes_per_token: int | KvCache,
    max_batch_bytes: int,
    max_batch_items: int,
) -> list[list[int]]:
    """Positions grouped into batches, longest prompts first, similar lengths together.

    A batch of n prompts padded to the longest takes n times what the longest takes with an answer of `max_new_tokens`:
    by a `KvCache`, or a number where every layer keeps every token. A prompt above the budget by itself is alone in its
    batch.

    They are as few as the budget allows where a tenth or less of what prefill computes is padding; else about as few as
    bring it there, each of them saving 512 padded tokens or more.
    """
    cache = KvCache(kv_bytes_per_token) if isinstance(kv_bytes_per_token, int) else kv_bytes_per_token
    order = _longest_first(prompt_lengths)
    lengths = [prompt_lengths[position] for position in order]
    needed = {length: cache.most_bytes(length, max_new_tokens) for length in set(lengths)}
    rooms = [max(1, min(max_batch_items, max_batch_bytes // max(1, needed[length]))) for length in lengths]
    batches = _fewest(rooms)
    padded = _padded(lengths, batches)
    if padded > max(_LEAST_SAVED, _MOST_PADDING * (padded + sum(lengths))):
        batches = _less_padded(lengths, rooms, padded)
    return [order[batch] for batch in batches]


def _padded(lengths: Sequence[int], batches: Iterable[slice]) -> int:
    return sum(len(part) * part[0] for part in (lengths[batch] for batch in batches)) - sum(lengths)


def _less_padded(lengths: Sequence[int], rooms: Sequence[int], padded: int) -> list[slice]:
    """Batches of `lengths`, longest first, that minimise padded tokens plus a price a batch, at the highest price that
    leaves a tenth of padding or less.

    A dynamic programme over where batches begin, for 16 prices together; `best[i]` is the least that the first i cost.
    """
    prices = np.geomspace(padded, _LEAST_SAVED, 16)
    longest = np.array(lengths, np.float64)[:, None]
    best = np.zeros((len(lengths) + 1, len(prices)))
    begins = np.zeros((len(lengths) + 1, len(prices)), np.int64)
    first = 0  # where the batch may begin that ends before `stop`
    for stop in range(1, len(lengths) + 1):
        while first + rooms[first] < stop:
            first += 1
        counts = np.arange(stop - first, 0, -1)[:, None]
        costs = best[first:stop] + counts * longest[first:stop]
        chosen = costs.argmin(axis=0)
        begins[stop] = first + chosen
        best[stop] = costs[chosen, np.arange(len(prices))] + prices
    for price in range(len(prices)):
        starts = [int(begins[len(lengths), price])]
        while starts[-1]:
            starts.append(int(begins[starts[-1], price]))
        batches = _between(starts[::-1], len(lengths))
        left = _padded(lengths, batches)
        if left <= _MOST_PADDING * (left + sum(lengths)):
            break
    return batches


def in_input_order(batches: Iterable[Sequence[int]], results: Iterable[Sequence[T]]) -> list[T]:
    """The results of batches of positions, one a position, by position.

    Raises `ValueError` when the positions are not 0 to their number - 1, each once, or results are missing or over.
    """
    pairs = [pair for batch, values in zip(batches, results, strict=True) for pair in zip(batch, values, strict=True)]
    by_position = dict(pairs)
    if len(by_position) != len(pairs) or by_position.keys() != set(range(len(pairs))):
        raise ValueError(f"{len(pairs)} results are not for the positions 0 to {len(pairs) - 1}, each once")
    return [by_position[position] for position in range(len(pairs))]
