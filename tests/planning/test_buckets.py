from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.buckets import BatchBudget, ShapedMedia, plan_window
from pipeline.schema import Geometry


def shaped(position: int, modality: str, frames: int, rows: int, columns: int) -> ShapedMedia:
    size = (16 * rows, 16 * columns)
    grid = ((frames + 1) // 2, rows, columns)
    geometry = Geometry(
        grid=grid,
        merge_size=2,
        feature_length=grid[0] * rows * columns // 4,
        original_size=size,
        resized_size=size,
    )
    return ShapedMedia(
        position=position, modality=modality, num_frames=frames, geometry=geometry, identity=f"source-{position}"
    )


SHAPES = st.tuples(
    st.sampled_from(["image", "video"]), st.integers(1, 8), st.sampled_from([2, 4, 6]), st.sampled_from([2, 4])
)
BUDGETS = st.builds(
    BatchBudget, max_items=st.integers(1, 9), max_tokens=st.integers(1, 400), max_frame_bytes=st.integers(1, 10**6)
)


@given(st.lists(SHAPES, max_size=60), BUDGETS)
def test_every_item_once_one_shape_a_batch_within_the_budget(shapes: list, budget: BatchBudget) -> None:
    items = [shaped(i, *shape) for i, shape in enumerate(shapes)]
    batches = plan_window(3, items, budget)
    assert Counter(item.position for batch in batches for item in batch.items) == Counter(range(len(items)))
    assert [batch.batch for batch in batches] == list(range(len(batches)))
    for batch in batches:
        assert len({item.shape for item in batch.items}) == 1
        if len(batch.items) > 1:  # an item above a limit by itself travels alone
            t, h, w = batch.items[0].geometry.grid
            assert len(batch.items) <= budget.max_items
            assert len(batch.items) * t * h * w <= budget.max_tokens
            assert sum(item.frame_bytes for item in batch.items) <= budget.max_frame_bytes


@given(st.lists(SHAPES, min_size=1, max_size=30), BUDGETS)
def test_equal_windows_have_equal_digests_and_another_source_another(shapes: list, budget: BatchBudget) -> None:
    items = [shaped(i, *shape) for i, shape in enumerate(shapes)]
    digests = [batch.digest for batch in plan_window(0, items, budget)]
    assert digests == [batch.digest for batch in plan_window(0, items, budget)]
    assert len(set(digests)) == len(digests)
    changed = [*items[:-1], ShapedMedia(**{f: getattr(items[-1], f) for f in FIELDS} | {"identity": "other"})]
    assert sum(a != b.digest for a, b in zip(digests, plan_window(0, changed, budget), strict=True)) == 1


FIELDS = ("position", "modality", "num_frames", "geometry", "identity")


def test_largest_shapes_start_first() -> None:
    items = [shaped(0, "image", 1, 2, 2), shaped(1, "video", 8, 6, 4), shaped(2, "image", 1, 6, 4)]
    batches = plan_window(0, items, BatchBudget(max_items=8, max_tokens=10**6))
    assert [batch.items[0].position for batch in batches] == [1, 2, 0]


def test_computed_tokens_are_patches() -> None:
    [batch] = plan_window(0, [shaped(i, "video", 4, 6, 4) for i in range(3)], BatchBudget(max_items=8, max_tokens=999))
    assert batch.computed_tokens == 3 * 2 * 6 * 4
