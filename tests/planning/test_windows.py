import pytest

from pipeline.planning.windows import plan_windows, segments


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


def test_segments_are_runs_of_windows() -> None:
    windows = plan_windows(50, first_items=10, full_items=10)
    assert [[w.index for w in s] for s in segments(windows, 2)] == [[0, 1], [2, 3], [4]]
