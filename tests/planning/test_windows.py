import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.windows import full_window_items, num_fitting, plan_windows, segments


@pytest.mark.parametrize(
    ("num_items", "sizes"),
    [(0, []), (1, [1]), (512, [512]), (513, [512, 1]), (10_000, [512, 1024, 2048, 4096, 2320])],
)
def test_windows_ramp_up_and_cover_every_item(num_items: int, sizes: list[int]) -> None:
    windows = plan_windows(num_items, first_items=512, full_items=4096)
    assert [w.stop - w.start for w in windows] == sizes
    assert [w.index for w in windows] == list(range(len(sizes)))
    assert [w.start for w in windows] == [sum(sizes[:i]) for i in range(len(sizes))]


def test_a_first_window_larger_than_the_others_is_cut() -> None:
    assert [w.stop for w in plan_windows(25, first_items=99, full_items=10)] == [10, 20, 25]


@pytest.mark.parametrize(("most", "items"), [(1, 4096), (256, 4096), (409, 4096), (410, 4100), (1024, 10_240)])
def test_a_full_window_has_ten_batches_at_the_least(most: int, items: int) -> None:
    assert full_window_items(most) == items


def test_segments_are_runs_of_windows() -> None:
    windows = plan_windows(50, first_items=10, full_items=10)
    assert [[w.index for w in s] for s in segments(windows, 2)] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("sizes", "room", "limit", "count"),
    [
        ([], 9, 9, 0),
        ([4, 5, 1], 9, 9, 2),
        ([4, 5, 1], 10, 9, 3),
        ([4, 5, 1], 10, 2, 2),
        ([10, 1], 9, 9, 0),  # the order is kept: the next is not taken in its place
        ([0, 0], 0, 9, 2),
        ([0, 1], -1, 9, 0),
    ],
)
def test_windows_that_fit_together(sizes: list[int], room: int, limit: int, count: int) -> None:
    assert num_fitting(sizes, room, limit) == count


@given(st.lists(st.integers(0, 100)), st.integers(-10, 1000), st.integers(1, 20))
def test_as_many_as_fit_and_not_one_more(sizes: list[int], room: int, limit: int) -> None:
    count = num_fitting(sizes, room, limit)
    assert 0 <= count <= min(limit, len(sizes))
    assert count == 0 or sum(sizes[:count]) <= room
    assert count in (limit, len(sizes)) or sum(sizes[: count + 1]) > room


@given(st.lists(st.integers(0, 50), min_size=1), st.integers(50, 500), st.integers(1, 20))
def test_segment_by_segment_every_window_has_its_turn(sizes: list[int], room: int, limit: int) -> None:
    """As segments are made of what is left: consecutive, none empty, and no two that would have fitted together."""
    left, taken = list(sizes), []
    while left:
        count = num_fitting(left, room, limit)
        assert count >= 1
        taken.append(left[:count])
        left = left[count:]
    assert [size for segment in taken for size in segment] == sizes
    for one, next_one in itertools.pairwise(taken):
        assert sum(one) <= room and (len(one) == limit or sum(one) + next_one[0] > room)
