"""WebPs decoded by libwebp itself have Pillow's pixels, and whatever is wrong with one is left to Pillow."""

import io

import hostile_images
import numpy as np
import pytest
from PIL import Image

from pipeline.media.image import decode_image
from pipeline.media.webp import webp_pixels


def saved(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "WEBP", **options)
    return file.getvalue()


@pytest.mark.parametrize("size", [(1, 1), (3, 200), (65, 63), (640, 479)])
@pytest.mark.parametrize("options", [{"quality": 80}, {"quality": 10}, {"lossless": True}])
def test_the_pixels_are_pillows(size: tuple[int, int], options: dict[str, object]) -> None:
    noise = np.random.default_rng(3).integers(0, 256, (size[1] // 8 + 1, size[0] // 8 + 1, 3), dtype=np.uint8)
    data = saved(Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC), **options)
    found = webp_pixels(data, size)
    assert found is not None and np.array_equal(found, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_pillow_is_not_asked_to_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(hostile_images.photograph(), exif=b"")
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    monkeypatch.setattr("PIL.WebPImagePlugin.WebPImageFile.load", None)
    assert np.array_equal(decode_image(data, None).pixels[0], expected)


def test_animations_other_sizes_and_faults_are_left_to_pillow() -> None:
    files = hostile_images.whole_files()
    size = hostile_images.SIZE[::-1]
    assert webp_pixels(files["webp-lossless"], size) is not None
    assert webp_pixels(files["webp-lossless"], hostile_images.SIZE) is None
    assert webp_pixels(files["webp-animated"], size) is None
    for kind in ("webp", "webp-lossless"):
        for num_bytes in (0, 12, 20, 40, len(files[kind]) // 2, len(files[kind]) * 9 // 10):
            assert webp_pixels(files[kind][:num_bytes], size) is None
