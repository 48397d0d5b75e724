import dataclasses
import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.buckets import (
    BatchBudget,
    PlannedBatch,
    ShapedMedia,
    computed_tokens,
    plan_window,
    tower_layout,
)
from pipeline.planning.geometry import PatchRule
from pipeline.planning.image_size import ExactSize, ImageRule, MaxPatches, ShortestEdge
from pipeline.schema import Geometry

LAYOUTS = ("fixed", "packed", "padded")


def shaped(position: int, modality: Any, frames: int, rows: int, columns: int) -> ShapedMedia:
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


def tokens(item: ShapedMedia) -> int:
    return math.prod(item.geometry.grid)


def frame_tokens(item: ShapedMedia) -> int:
    return math.prod(item.geometry.grid[1:])


SHAPES = st.tuples(
    st.sampled_from(["image", "video"]), st.integers(1, 8), st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 5])
)
BUDGETS = st.builds(
    BatchBudget,
    max_items=st.integers(1, 9),
    max_tokens=st.integers(1, 400),
    max_frame_bytes=st.integers(1, 10**6),
    layouts=st.fixed_dictionaries({"image": st.sampled_from(LAYOUTS), "video": st.sampled_from(LAYOUTS)}),
    max_shapes=st.integers(1, 4),
)


@given(st.lists(SHAPES, max_size=60), BUDGETS)
def test_every_item_once_as_its_tower_takes_it_within_the_budget(shapes: list, budget: BatchBudget) -> None:
    items = [shaped(i, *shape) for i, shape in enumerate(shapes)]
    batches = plan_window(3, items, budget)
    assert Counter(item.position for batch in batches for item in batch.items) == Counter(range(len(items)))
    assert [(batch.window, batch.batch) for batch in batches] == [(3, number) for number in range(len(batches))]
    for batch in batches:
        [modality] = {item.modality for item in batch.items}
        layout = budget.layouts[modality]
        own = sum(tokens(item) for item in batch.items)
        if layout == "padded":
            frames = sum(item.geometry.grid[0] for item in batch.items)
            assert batch.computed_tokens == frames * max(map(frame_tokens, batch.items))
        else:
            assert batch.computed_tokens == own
        assert batch.padded_tokens == batch.computed_tokens - own
        if layout == "fixed":
            assert len({item.geometry.grid[1:] for item in batch.items}) == 1
        if len(batch.items) > 1:  # an item above a limit by itself travels alone
            assert len(batch.items) <= budget.max_items
            assert batch.computed_tokens <= budget.max_tokens
            assert sum(item.frame_bytes for item in batch.items) <= budget.max_frame_bytes


@given(st.lists(SHAPES, min_size=1, max_size=30), BUDGETS, st.randoms(use_true_random=False))
def test_a_plan_depends_on_the_items_and_on_nothing_else(
    shapes: list, budget: BatchBudget, order: random.Random
) -> None:
    items = [shaped(i, *shape) for i, shape in enumerate(shapes)]
    batches = plan_window(0, items, budget)
    digests = [batch.digest for batch in batches]
    assert len(set(digests)) == len(digests)
    assert plan_window(0, order.sample(items, len(items)), budget) == batches
    changed = [*items[:-1], dataclasses.replace(items[-1], identity="other")]
    assert sum(a != b.digest for a, b in zip(digests, plan_window(0, changed, budget), strict=True)) == 1


def test_a_digest_is_the_one_that_it_was() -> None:
    """Resumed runs and receipts go by it. Worked out with sha256sum over the JSON below."""
    batch = PlannedBatch(window=1, batch=2, items=(shaped(0, "image", 1, 2, 3),), computed_tokens=6)
    # [1, 2, [["image", 1, 32, 48, "source-0"]]]
    assert batch.digest == "96a90d4aeb6c2cb7"


def test_largest_shapes_start_first() -> None:
    items = [shaped(0, "image", 1, 2, 2), shaped(1, "video", 8, 6, 4), shaped(2, "image", 1, 6, 4)]
    batches = plan_window(0, items, BatchBudget(max_items=8, max_tokens=10**6))
    assert [batch.items[0].position for batch in batches] == [1, 2, 0]


def positions(batches: list[PlannedBatch]) -> list[list[int]]:
    return [[item.position for item in batch.items] for batch in batches]


def test_a_packed_batch_takes_near_sizes_first_and_fills_up_with_small_ones() -> None:
    sizes = [(8, 8), (8, 7), (5, 8), (4, 6), (2, 2), (2, 1), (1, 1)]  # 64, 56, 40, 24, 4, 2, 1 patches
    items = [shaped(i, "image", 1, *size) for i, size in enumerate(sizes)]
    budget = BatchBudget(max_items=8, max_tokens=127, layouts={"image": "packed"})
    # 64 + 56 + 4 + 2 + 1 = 127; what is left is 40 + 24
    assert positions(plan_window(0, items, budget)) == [[0, 1, 4, 5, 6], [2, 3]]


def test_a_lone_giant_travels_alone_and_changes_no_other_batch() -> None:
    rest = [shaped(i, "image", 1, 4 + i % 3, 5) for i in range(30)]
    giant = shaped(30, "image", 1, 40, 40)
    for layout in LAYOUTS:
        budget = BatchBudget(max_items=64, max_tokens=200, layouts={"image": layout})
        without, with_giant = (positions(plan_window(0, items, budget)) for items in (rest, [*rest, giant]))
        assert with_giant == [[30], *without]


def test_videos_share_a_batch_by_their_frames_patches_not_by_their_number() -> None:
    items = [shaped(0, "video", 8, 4, 4), shaped(1, "video", 2, 4, 4), shaped(2, "video", 8, 4, 5)]
    budget = BatchBudget(max_items=8, max_tokens=1000)
    assert positions(plan_window(0, items, budget)) == [[2], [0, 1]]
    packed = BatchBudget(max_items=8, max_tokens=1000, layouts={"video": "packed"})
    assert positions(plan_window(0, items, packed)) == [[2, 0, 1]]


def test_padded_buckets_part_where_padding_would_cost_most() -> None:
    lengths = [(10, 10)] * 6 + [(9, 11)] * 6 + [(3, 10)] * 12  # 100, 99, 30 patches
    items = [shaped(i, "image", 1, *size) for i, size in enumerate(lengths)]
    budget = BatchBudget(max_items=99, max_tokens=1200, layouts={"image": "padded"}, max_shapes=2)
    long, short = plan_window(0, items, budget)
    assert (long.computed_tokens, long.padded_tokens) == (12 * 100, 6)
    assert (short.computed_tokens, short.padded_tokens) == (12 * 30, 0)


def test_a_batch_crosses_a_bound_while_padding_is_little() -> None:
    lengths = [(10, 10), (9, 11), (7, 14), (3, 10), (3, 10)]  # 100, 99, 98, 30, 30 patches
    items = [shaped(i, "image", 1, *size) for i, size in enumerate(lengths)]
    budget = BatchBudget(max_items=99, max_tokens=1200, layouts={"image": "padded"})
    assert positions(plan_window(0, items, budget)) == [[0, 1, 2], [3, 4]]


def test_a_padded_batch_counts_frames_and_takes_longer_ones_before_more() -> None:
    clips = [(8, 4, 5), (6, 4, 5), (2, 4, 5), (8, 4, 4)]  # 4, 3, 1, 4 frames of 20, 20, 20, 16 patches
    items = [shaped(i, "video", *clip) for i, clip in enumerate(clips)]
    budget = BatchBudget(max_items=9, max_tokens=100, layouts={"video": "padded"})
    assert positions(plan_window(0, items, budget)) == [[0, 2], [3], [1]]


def test_three_quarter_images_padded_to_a_full_one_are_mostly_padding() -> None:
    """The field's number: 3 * (1 - 1/4) of a full image's patches."""
    full, quarter = (32, 32), (16, 16)
    images = [shaped(i, "image", 1, *size) for i, size in enumerate([full, quarter, quarter, quarter])]
    padded = computed_tokens("padded", [image.geometry for image in images]) - sum(map(tokens, images))
    assert padded == 3 * (1024 - 256) == 2304
    budget = BatchBudget(max_items=4, max_tokens=4096, layouts={"image": "padded"})
    assert [batch.padded_tokens for batch in plan_window(0, images, budget)] == [0, 0]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_batches_of_many_sizes_are_full(layout: Any) -> None:
    """All but the last, for the sizes of a window that were drawn at random."""
    drawn = random.Random(4)
    items = [shaped(i, "image", 1, drawn.randint(8, 16), drawn.randint(8, 16)) for i in range(2000)]
    budget = BatchBudget(max_items=10**4, max_tokens=8192, layouts={"image": layout})
    *full, _ = plan_window(0, items, budget)
    assert sum(batch.computed_tokens for batch in full) >= 0.95 * 8192 * len(full)
    assert sum(batch.padded_tokens for batch in full) <= 0.05 * 8192 * len(full)


def test_how_towers_take_batches() -> None:
    ragged = PatchRule(patch_size=14, merge_size=2, temporal_patch_size=2, min_pixels=1, max_pixels=10**6)
    sizes = (MaxPatches(patch_size=16, max_patches=256), ExactSize(height=224, width=224), ShortestEdge(edge=224))
    rules = [ImageRule(resize=size, crop=None, patch_size=16) for size in sizes]
    assert [tower_layout(rule) for rule in (ragged, *rules, None)] == ["packed", "padded", "fixed", "fixed", "fixed"]
