import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as reference
from transformers import CLIPImageProcessor

from pipeline.media.resize import crop_frames, resize_backend, resize_frames

ROOT = Path(__file__).parents[2]


def torchvision_resize(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    frames = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    resized = reference.resize(frames, list(size), interpolation=InterpolationMode.BICUBIC, antialias=True)
    return resized.permute(0, 2, 3, 1).numpy()


def shapes() -> list[tuple[int, int, int, int, int]]:
    rng = random.Random(5)
    sides = [(rng.randint(1, 400), rng.randint(1, 400), rng.randint(1, 400), rng.randint(1, 400)) for _ in range(30)]
    fixed = [(768, 1024, 336, 448), (720, 1280, 336, 588), (28, 28, 280, 280), (1, 1, 56, 56), (337, 511, 28, 1400)]
    return [(rng.choice([1, 1, 2, 5]), *side) for side in sides + fixed]


@pytest.mark.parametrize("num_frames, height, width, new_height, new_width", shapes())
def test_pixels_equal_torchvisions(num_frames, height, width, new_height, new_width):
    pixels = np.random.default_rng(height * width).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)
    resized = resize_frames(pixels, (new_height, new_width))
    assert resized.shape == (num_frames, new_height, new_width, 3)
    assert resized.flags.c_contiguous
    assert np.array_equal(resized, torchvision_resize(pixels, (new_height, new_width)))


def test_saturated_edges_do_not_wrap():
    pixels = np.zeros((1, 32, 32, 3), np.uint8)
    pixels[:, :, 16:] = 255
    resized = resize_frames(pixels, (32, 200))
    assert np.array_equal(resized, torchvision_resize(pixels, (32, 200)))
    assert resized.min() == 0 and resized.max() == 255 and np.all(np.diff(resized[0, 0, 90:110, 0].astype(int)) >= 0)


def test_equal_size_is_left_alone():
    pixels = np.zeros((2, 30, 40, 3), np.uint8)
    assert resize_frames(pixels, (30, 40)) is pixels


@pytest.mark.parametrize("view", [np.s_[:, ::-1], np.s_[:, :, ::-1], np.s_[:, ::2, 3:]])
def test_views_and_read_only_arrays_are_taken(view):
    pixels = np.random.default_rng(0).integers(0, 256, (1, 60, 80, 3), dtype=np.uint8)
    pixels.flags.writeable = False
    assert np.array_equal(resize_frames(pixels[view], (20, 30)), torchvision_resize(pixels[view].copy(), (20, 30)))


def test_the_input_is_not_changed():
    pixels = np.random.default_rng(0).integers(0, 256, (1, 60, 80, 3), dtype=np.uint8)
    before = pixels.copy()
    resize_frames(pixels, (20, 30))
    assert np.array_equal(pixels, before)


def test_torch_is_not_imported_for_it():
    look = (
        "import sys, numpy; from pipeline.media.resize import resize_frames; "
        "print(resize_frames(numpy.full((1, 4, 4, 3), 7, numpy.uint8), (2, 2)).sum(), 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["84", "False"]


def test_the_back_end_names_the_torch_release():
    assert resize_backend().endswith("/" + torch.__version__.split("+")[0])


def test_bilinear_pixels_equal_torchvisions():
    rng = np.random.default_rng(8)
    for height, width, new_height, new_width in [(61, 83, 40, 48), (20, 30, 64, 32), (300, 7, 112, 16)]:
        pixels = rng.integers(0, 256, (2, height, width, 3), dtype=np.uint8)
        frames = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
        size, mode = [new_height, new_width], InterpolationMode.BILINEAR
        expected = reference.resize(frames, size, interpolation=mode, antialias=True).permute(0, 2, 3, 1).numpy()
        assert np.array_equal(resize_frames(pixels, (new_height, new_width), "bilinear"), expected)


@pytest.mark.parametrize("size", [(32, 32), (31, 20), (48, 80), (60, 81), (49, 100), (100, 33)])
def test_crops_equal_the_image_processors(size):
    pixels = np.random.default_rng(1).integers(0, 256, (2, 48, 80, 3), dtype=np.uint8)
    crop_size = {"height": size[0], "width": size[1]}
    processor = CLIPImageProcessor(do_resize=False, do_rescale=False, do_normalize=False, crop_size=crop_size)
    expected = processor(images=list(pixels), return_tensors="np")["pixel_values"].transpose(0, 2, 3, 1)
    cropped = crop_frames(pixels, size)
    assert cropped.dtype == np.uint8 and cropped.flags.c_contiguous and np.array_equal(cropped, expected)
