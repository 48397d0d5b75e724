import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.language.batching import in_input_order, length_runs, plan_language_batches, plan_text_batches
from pipeline.language.kv_cache import KvCache


@given(
    st.lists(st.integers(1, 500), max_size=80),
    st.integers(1, 100),
    st.integers(1, 2000),
    st.integers(1, 10**6),
    st.integers(1, 9),
)
def test_every_prompt_once_within_memory(
    lengths: list[int], new_tokens: int, kv_bytes: int, budget: int, most: int
) -> None:
    batches = plan_language_batches(
        lengths, max_new_tokens=new_tokens, kv_bytes_per_token=kv_bytes, max_batch_bytes=budget, max_batch_items=most
    )
    assert sorted(position for batch in batches for position in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[position] for position in batch)
        assert len(batch) <= most
        assert len(batch) == 1 or len(batch) * (longest + new_tokens) * kv_bytes <= budget
    flat = [lengths[position] for batch in batches for position in batch]
    assert flat == sorted(lengths, reverse=True)


def test_the_field_s_worked_number() -> None:
    # 32 layers, 8 key-value heads of 128, 2 bytes: 128 KiB a token, so 576 tokens take 72 MiB.
    per_token = 2 * 32 * 8 * 128 * 2
    assert 576 * per_token == 72 * 2**20
    fits = plan_language_batches(
        [476] * 4, max_new_tokens=100, kv_bytes_per_token=per_token, max_batch_bytes=3 * 72 * 2**20, max_batch_items=9
    )
    assert [len(batch) for batch in fits] == [3, 1]


def padded(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> int:
    return sum(max(lengths[p] for p in batch) * len(batch) - sum(lengths[p] for p in batch) for batch in batches)


def every_grouping(count: int) -> Iterator[list[list[int]]]:
    """Of neighbours."""
    for cuts in itertools.product((False, True), repeat=max(0, count - 1)):
        starts = [0, *(k + 1 for k, cut in enumerate(cuts) if cut)]
        yield [list(range(a, b)) for a, b in zip(starts, [*starts[1:], count], strict=True)]


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=9), st.integers(9000, 30_000), st.integers(2, 9))
def test_no_grouping_of_as_few_batches_pads_less_and_none_of_fewer_pads_a_tenth_or_less(
    lengths: list[int], budget: int, most: int
) -> None:
    batches = plan_language_batches(
        lengths, max_new_tokens=10, kv_bytes_per_token=1, max_batch_bytes=budget, max_batch_items=most
    )
    ordered = sorted(lengths, reverse=True)
    groupings = [
        (len(grouping), padded(ordered, grouping))
        for grouping in every_grouping(len(ordered))
        if all(len(b) <= most and (len(b) == 1 or len(b) * (ordered[b[0]] + 10) <= budget) for b in grouping)
    ]
    count, waste = len(batches), padded(lengths, batches)
    fewest, least_padded = min(groupings)
    if count == fewest and waste <= max(512, 0.1 * (waste + sum(lengths))):
        return  # a batch more would not be worth it
    assert waste == min(p for n, p in groupings if n <= count)
    assert least_padded - waste >= 512 * (count - fewest)


@pytest.mark.parametrize(("median", "spread"), [(300, 1.0), (400, 0.6), (1200, 1.3)])
@pytest.mark.parametrize("most", [32, 256])
def test_a_window_of_prompts_with_a_long_tail_pads_a_tenth_or_less(median: int, spread: float, most: int) -> None:
    rng = random.Random(7)
    lengths = [min(16_000, max(16, round(rng.lognormvariate(math.log(median), spread)))) for _ in range(512)]
    # 36 layers of 8 heads of 128, 2 bytes (Qwen3-VL 8B); half of an accelerator's memory.
    cache = KvCache(2 * 36 * 8 * 128 * 2)
    batches = plan_language_batches(
        lengths, max_new_tokens=128, kv_bytes_per_token=cache, max_batch_bytes=64 * 2**30, max_batch_items=most
    )
    waste = padded(lengths, batches)
    assert waste <= 0.1 * (waste + sum(lengths))
    assert len(batches) <= 32  # 16 prompts a batch or more, on average


def test_a_giant_is_alone_and_nothing_is_cut_for_little() -> None:
    def plan(lengths: list[int]) -> list[list[int]]:
        return plan_language_batches(
            lengths, max_new_tokens=1, kv_bytes_per_token=1, max_batch_bytes=10**9, max_batch_items=99
        )

    assert plan([100, 10_000, 101]) == [[1], [2, 0]]
    assert plan([10, 60, 20]) == [[1, 2, 0]]  # half of it is padding, but only 90 tokens


def test_windows_let_more_prompts_into_a_batch() -> None:
    # Half of the bytes are of layers that keep 99 tokens: 1000 + 1000 prefill 2000 bytes, then hold 2000 + 99.
    windowed, full = KvCache(1, ((99, 1),)), KvCache(2)
    sizes = {"max_new_tokens": 1000, "max_batch_bytes": 8 * 2099, "max_batch_items": 99}
    assert len(plan_language_batches([1000] * 8, kv_bytes_per_token=windowed, **sizes)) == 1
    assert len(plan_language_batches([1000] * 8, kv_bytes_per_token=full, **sizes)) == 2
    # A prompt longer than what stays of it: prefill holds the whole of it in every layer.
    sizes["max_new_tokens"] = 100
    assert len(plan_language_batches([4000] * 2, kv_bytes_per_token=windowed, **sizes)) == 1
    assert len(plan_language_batches([4000] * 3, kv_bytes_per_token=windowed, **sizes)) == 2


@given(st.lists(st.integers(0, 500), max_size=80), st.integers(1, 2000), st.integers(1, 9), st.randoms())
def test_every_text_once_within_padded_tokens_and_back_in_order(
    lengths: list[int], budget: int, most: int, rng: random.Random
) -> None:
    batches = plan_text_batches(lengths, max_batch_tokens=budget, max_batch_items=most)
    assert batches == plan_text_batches(lengths, max_batch_tokens=budget, max_batch_items=most)
    for batch in batches:
        assert len(batch) <= most
        assert len(batch) == 1 or len(batch) * max(lengths[position] for position in batch) <= budget
    assert [lengths[position] for batch in batches for position in batch] == sorted(lengths, reverse=True)
    rng.shuffle(batches)
    assert in_input_order(batches, [[f"text {position}" for position in batch] for batch in batches]) == [
        f"text {position}" for position in range(len(lengths))
    ]


@pytest.mark.parametrize(
    ("batches", "results"),
    [([[0], [0]], [["a"], ["b"]]), ([[0, 2]], [["a", "b"]]), ([[0, 1]], [["a"]]), ([[0]], [["a"], ["b"]])],
)
def test_results_that_are_not_one_a_position_are_found(batches: list, results: list) -> None:
    with pytest.raises(ValueError):
        in_input_order(batches, results)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=80), st.integers(1, 2000))
def test_runs_are_the_batch_in_order_and_short_of_padding(lengths: list[int], least: int) -> None:
    lengths.sort(reverse=True)
    runs = length_runs(lengths, least_tokens=least)
    assert [length for run in runs for length in lengths[run]] == lengths
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        longest, count = lengths[run][0], len(lengths[run])
        if following is not None:
            assert count * longest >= least and lengths[following][0] < 0.95 * longest
        # What is padded by more than a twentieth is there to fill up to the least.
        short = [position for position, length in enumerate(lengths[run]) if length < 0.95 * longest]
        assert all(position * longest < least for position in short)


def test_runs_by_hand() -> None:
    assert length_runs([100, 96, 94, 50, 49, 20], least_tokens=1) == [
        slice(0, 2),
        slice(2, 3),
        slice(3, 5),
        slice(5, 6),
    ]
    assert length_runs([100, 96, 94, 50, 49, 20], least_tokens=300) == [slice(0, 3), slice(3, 6)]
