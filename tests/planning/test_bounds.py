import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.bounds import bucket_bounds


def padded_total(rows: dict[int, int], bounds: tuple[int, ...]) -> int:
    """Tokens when each row is padded to the next bound."""
    return sum(count * min(bound for bound in bounds if bound >= length) for length, count in rows.items())


@given(st.dictionaries(st.integers(1, 40), st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 9))
def test_bounds_cost_what_the_best_of_all_choices_costs(rows: dict[int, int], max_shapes: int) -> None:
    bounds = bucket_bounds(rows, max_shapes)
    longest = max(rows)
    others = sorted(rows.keys() - {longest})
    choices = [
        (*choice, longest)
        for count in range(min(max_shapes, len(rows)))
        for choice in itertools.combinations(others, count)
    ]
    totals = [padded_total(rows, choice) for choice in choices]
    best = min(totals)
    assert padded_total(rows, tuple(bounds)) == best
    assert bounds == sorted(set(bounds)) and len(bounds) <= max_shapes
    # No bound that saves nothing: of the best choices none has fewer.
    assert len(bounds) == min(len(choice) for choice, total in zip(choices, totals, strict=True) if total == best)


@given(
    st.dictionaries(st.integers(1, 40), st.integers(1, 20), min_size=1, max_size=8),
    st.integers(1, 9),
    st.floats(0.01, 0.5),
)
def test_bounds_are_as_few_as_keep_within_the_padding(rows: dict[int, int], max_shapes: int, share: float) -> None:
    bounds = bucket_bounds(rows, max_shapes, max_padding=share)
    own = sum(length * count for length, count in rows.items())
    total = padded_total(rows, tuple(bounds))
    assert len(bounds) == min(max_shapes, len(rows)) or total - own <= share * total
    if len(bounds) > 1:
        fewer = padded_total(rows, tuple(bucket_bounds(rows, len(bounds) - 1)))
        assert fewer - own > share * fewer


@pytest.mark.parametrize(
    ("rows", "max_shapes", "bounds"),
    [
        ({}, 3, []),
        ({7: 5}, 3, [7]),
        ({1: 1, 2: 1, 3: 1}, 3, [1, 2, 3]),
        # 100 rows of 10 are cheaper kept apart from 11 (100 tokens) than the one of 11 from 20 (9).
        ({10: 100, 11: 1, 20: 1}, 2, [10, 20]),
        ({10: 1, 11: 100, 20: 1}, 2, [11, 20]),
    ],
)
def test_bounds_of_small_histograms(rows: dict[int, int], max_shapes: int, bounds: list[int]) -> None:
    assert bucket_bounds(rows, max_shapes) == bounds
