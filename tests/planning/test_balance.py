import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.balance import balanced_order

COSTS = st.lists(st.floats(0, 100), max_size=40)


def cut(costs: list[float], order: list[int], per_block: int, ahead: int) -> list[list[float]]:
    """The blocks, as rows are cut behind every `per_block`-th, with `ahead` rows of nothing before them."""
    rows = [0.0] * ahead + [costs[index] for index in order]
    blocks = [rows[i : i + per_block] for i in range(0, len(rows), per_block)]
    return blocks[ahead // per_block :]


@given(COSTS, st.integers(1, 6), st.integers(0, 9))
def test_each_once_and_the_costliest_apart(costs: list[float], per_block: int, ahead: int) -> None:
    order = balanced_order(costs, per_block=per_block, ahead=ahead)
    assert sorted(order) == list(range(len(costs)))
    blocks = cut(costs, order, per_block, ahead)
    costliest = sorted(costs)[-len(blocks) :]
    threshold = costliest[0] if costliest else 0
    assert all(sum(cost > threshold for cost in block) <= 1 for block in blocks)


@given(st.lists(st.integers(0, 20), min_size=2, max_size=7), st.integers(2, 3))
def test_the_heaviest_block_is_below_twice_that_of_the_best_cut(costs: list[int], per_block: int) -> None:
    def heaviest(order: list[int]) -> float:
        return max(map(sum, cut(list(map(float, costs)), order, per_block, 0)))

    best = min(heaviest(list(order)) for order in itertools.permutations(range(len(costs))))
    assert heaviest(balanced_order(costs, per_block=per_block)) < max(2 * best, 1)


@pytest.mark.parametrize("ahead", [0, 1])
def test_blocks_of_a_heavy_tailed_window_cost_about_the_same(ahead: int) -> None:
    """Where plan order, costliest last for a change, has blocks that cost 50 times as much as others."""
    rng = random.Random(1)
    costs = sorted(min(rng.paretovariate(1.2), 20.0) for _ in range(400))
    totals = [sum(block) for block in cut(costs, balanced_order(costs, per_block=4, ahead=ahead), 4, ahead)]
    assert max(totals) < 1.05 * 20.0 + 4  # nothing but the cheapest beside one of the costliest
    in_order = [sum(block) for block in cut(costs, list(range(400)), 4, ahead)]
    assert max(in_order) / max(totals) > 3


def test_a_long_video_among_stills_and_stragglers_first() -> None:
    #        0    1    2    3    4    5    6    7
    costs = [1.0, 1.0, 9.0, 1.0, 9.0, 1.0, 1.0, 1.0]
    order = balanced_order(costs, per_block=4)
    assert [sum(block) for block in cut(costs, order, 4, 0)] == [12.0, 12.0]
    assert balanced_order([1.0, 2.0, 3.0], per_block=1) == [2, 1, 0]
    assert balanced_order([], per_block=4, ahead=1) == []


def test_equal_costs_make_equal_blocks_in_any_split() -> None:
    order = balanced_order([2.0] * 10, per_block=4, ahead=2)
    assert [len(block) for block in cut([2.0] * 10, order, 4, 2)] == [4, 4, 4]
    assert order == balanced_order([2.0] * 10, per_block=4, ahead=2)
