import random

import pytest
import torch
from transformers import Qwen2VLImageProcessor, Qwen3VLVideoProcessor

from pipeline.errors import ItemError
from pipeline.planning.geometry import PatchRule, image_geometry, video_geometry


def image_rule(processor: Qwen2VLImageProcessor) -> PatchRule:
    return PatchRule(
        patch_size=processor.patch_size,
        merge_size=processor.merge_size,
        temporal_patch_size=2,
        min_pixels=processor.size["shortest_edge"],
        max_pixels=processor.size["longest_edge"],
    )


@pytest.mark.parametrize(
    ("patch_size", "bounds"), [(14, (56 * 56, 28 * 28 * 1280)), (16, (64 * 64, 128 * 128)), (16, (65536, 16777216))]
)
def test_image_grids_equal_the_processors_on_2000_sizes(patch_size: int, bounds: tuple[int, int]) -> None:
    size = {"shortest_edge": bounds[0], "longest_edge": bounds[1]}
    processor = Qwen2VLImageProcessor(patch_size=patch_size, size=size)
    rng = random.Random(1)
    for _ in range(2000):
        height, width = rng.randint(1, 4000), rng.randint(1, 4000)
        if max(height, width) > 200 * min(height, width):
            continue
        _, rows, columns = image_geometry(image_rule(processor), height, width).grid
        assert rows * columns == processor.get_number_of_image_patches(height, width), (height, width)


@pytest.mark.parametrize("capped", [True, False])
def test_video_grids_equal_the_processors(capped: bool) -> None:
    size = {"shortest_edge": 64 * 64, "longest_edge": 16 * 128 * 128}
    processor = Qwen3VLVideoProcessor(cap_pixels_per_frame=capped, max_video_tokens=16, size=size)
    rule = PatchRule(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=size["shortest_edge"],
        max_pixels=size["longest_edge"],
        max_tokens_per_frame=16 if capped else None,
    )
    rng = random.Random(2)
    for _ in range(150):
        frames, height, width = rng.randint(2, 40), rng.randint(8, 900), rng.randint(8, 900)
        # A meta tensor has a shape and no pixels: the processor does its arithmetic and nothing else.
        blank = torch.empty(frames, 3, height, width, dtype=torch.uint8, device="meta")
        expected = processor(videos=[blank], do_sample_frames=False, input_data_format="channels_first")
        geometry = video_geometry(rule, frames, height, width)
        assert list(geometry.grid) == expected["video_grid_thw"][0].tolist(), (frames, height, width)
        assert geometry.feature_length == geometry.grid[0] * geometry.grid[1] * geometry.grid[2] // 4
        assert geometry.original_size == (height, width)


def test_sides_are_whole_patches_and_a_panorama_is_refused() -> None:
    rule = PatchRule(patch_size=14, merge_size=2, temporal_patch_size=2, min_pixels=3136, max_pixels=1003520)
    geometry = image_geometry(rule, 768, 1024)
    assert geometry.resized_size == (756, 1036)  # nearest multiples of 28 to 768 and 1024
    assert geometry.grid == (1, 54, 74)
    with pytest.raises(ItemError, match="extreme_aspect_ratio"):
        image_geometry(rule, 10, 2010)


def test_a_video_of_one_frame_is_the_callers_mistake() -> None:
    rule = PatchRule(patch_size=14, merge_size=2, temporal_patch_size=2, min_pixels=3136, max_pixels=1003520)
    with pytest.raises(ValueError, match="temporal patch"):
        video_geometry(rule, 1, 100, 100)
