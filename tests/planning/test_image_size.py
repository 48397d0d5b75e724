"""Sizes equal those that the image processors of transformers make of blank images."""

import random

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.image_transforms import get_resize_output_image_size
from transformers.models.siglip2.image_processing_siglip2 import get_image_size_for_max_num_patches

from pipeline.planning.geometry import framewise_geometry
from pipeline.planning.image_size import ExactSize, ImageRule, MaxPatches, ShortestEdge, resized_size


def sides(seed: int, count: int, most: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [(rng.randint(1, most), rng.randint(1, most)) for _ in range(count)]


@pytest.mark.parametrize("edge", [224, 336, 33])
def test_shortest_edges_equal_clips(edge: int) -> None:
    processor = hf.CLIPImageProcessor(size={"shortest_edge": edge}, do_center_crop=False)
    for height, width in [*sides(edge, 150, 700), (1, 1), (7, 700), (500, 500)]:
        # A meta tensor has a shape and no pixels: the processor does its arithmetic and nothing else.
        blank = torch.empty(3, height, width, dtype=torch.uint8, device="meta")
        made = processor(images=[blank], input_data_format="channels_first", return_tensors="pt")["pixel_values"]
        assert resized_size(ShortestEdge(edge=edge), height, width) == tuple(made.shape[-2:]), (height, width)


@pytest.mark.parametrize("edge", [224, 336])
def test_shortest_edges_and_crops_equal_clips_arithmetic_on_2000_sizes(edge: int) -> None:
    rule = ImageRule(resize=ShortestEdge(edge=edge), crop=(edge, edge), patch_size=14)
    for height, width in sides(edge + 1, 2000, 4000):
        blank = torch.empty(3, height, width, dtype=torch.uint8, device="meta")
        shape = {"default_to_square": False, "input_data_format": "channels_first"}
        expected = get_resize_output_image_size(blank, edge, **shape)
        geometry = framewise_geometry(rule, 1, height, width)
        assert (geometry.resized_size, geometry.grid) == (expected, (1, edge // 14, edge // 14)), (height, width)
        assert geometry.num_patches == (edge // 14) ** 2


@pytest.mark.parametrize(("patch_size", "max_patches"), [(16, 256), (16, 1024), (14, 729), (8, 20), (32, 1)])
def test_naflex_sizes_equal_siglip2s_on_2000_sizes(patch_size: int, max_patches: int) -> None:
    rule = MaxPatches(patch_size=patch_size, max_patches=max_patches)
    odd = [(1, 1), (1, 4000), (4000, 1), (3, 2), *((patch_size * n, patch_size * n) for n in (1, 5, 16, 27, 100))]
    for height, width in [*sides(max_patches, 2000, 4000), *sides(7, 200, 20), *odd]:
        expected = get_image_size_for_max_num_patches(height, width, patch_size, max_patches)
        assert resized_size(rule, height, width) == expected, (height, width)


def test_naflex_sizes_are_the_processors_own() -> None:
    processor = hf.Siglip2ImageProcessor(patch_size=8, max_num_patches=20)
    for height, width in sides(3, 50, 200):
        blank = np.zeros((height, width, 3), np.uint8)
        rows, columns = processor(images=[blank], return_tensors="pt")["spatial_shapes"][0].tolist()
        made = resized_size(MaxPatches(patch_size=8, max_patches=20), height, width)
        assert made == (8 * rows, 8 * columns)


def test_an_exact_size_is_that_of_every_image() -> None:
    assert {resized_size(ExactSize(height=384, width=256), *size) for size in sides(1, 20, 900)} == {(384, 256)}
