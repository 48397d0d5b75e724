import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.language.batching import in_input_order, length_runs, plan_language_batches, plan_text_batches


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
