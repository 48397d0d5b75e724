"""Embedded profiles: colours become sRGB, by arithmetic, and images without one, or with sRGB, stay as they are."""

import io

import numpy as np
import pytest
from icc_files import (
    ADOBE_RGB,
    SRGB,
    cmyk_profile,
    grey_of_lightness,
    grey_profile,
    rgb_as_srgb,
    rgb_profile,
    srgb_level,
)
from media_files import make_image, picture
from PIL import Image, ImageCms

from pipeline.media.color import srgb_transform
from pipeline.media.image import decode_image
from pipeline.media.resize import resize_frames

GAMMA = 563 / 256
ADOBE = rgb_profile(ADOBE_RGB, GAMMA)
SRGB_PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def saved(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def stored(data: bytes) -> np.ndarray:
    """The colours as the file has them."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def shown(data: bytes, size: tuple[int, int] | None = None) -> np.ndarray:
    return decode_image(data, size).pixels[0]


def off_by(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, in levels."""
    assert found.shape == expected.shape
    return float(np.abs(found - expected.astype(float)).max())


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_colours_with_a_profile_become_srgb(format: str) -> None:
    data = make_image(format, icc_profile=ADOBE)
    expected = rgb_as_srgb(stored(data), ADOBE_RGB, GAMMA)
    assert off_by(stored(data), expected) > 30
    assert off_by(shown(data), expected) < 1.6


@pytest.mark.parametrize("profile", [SRGB_PROFILE, rgb_profile(SRGB, 2.2)[:-4], b"", b"not a profile", ADOBE[:200]])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_srgb_and_what_is_no_profile_change_nothing(format: str, profile: bytes) -> None:
    data = make_image(format, icc_profile=profile)
    assert np.array_equal(shown(data), stored(data))


def test_a_profile_of_other_colours_than_the_pixels_or_as_large_as_a_picture_is_ignored() -> None:
    assert srgb_transform(ADOBE, "RGB") is not None
    assert srgb_transform(ADOBE, "CMYK") is None
    assert srgb_transform(cmyk_profile((50, 50, 50, 50)), "RGB") is None
    assert srgb_transform(ADOBE + bytes(5 * 2**20), "RGB") is None


def test_a_resized_image_is_converted_at_its_new_size() -> None:
    data = make_image("JPEG", icc_profile=ADOBE)
    resized = resize_frames(stored(data)[np.newaxis], (28, 56))[0]
    assert off_by(shown(data, (28, 56)), rgb_as_srgb(resized, ADOBE_RGB, GAMMA)) < 1.6


@pytest.mark.parametrize("mode", ["L", "LA"])
def test_grey_has_a_curve_of_its_own(mode: str) -> None:
    grey = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).convert(mode)
    pixels = shown(saved(grey, "PNG", icc_profile=grey_profile(1.5)))
    expected = srgb_level((np.arange(256).reshape(16, 16) / 255) ** 1.5)
    assert off_by(pixels, np.repeat(expected[..., np.newaxis], 3, axis=2)) < 2.1


def test_16_bit_grey_has_a_curve_too() -> None:
    grey = Image.fromarray((np.arange(256, dtype=np.uint16) * 257).reshape(16, 16))
    pixels = shown(saved(grey, "PNG", icc_profile=grey_profile(1.5)))
    assert off_by(pixels[..., 1], srgb_level((np.arange(256).reshape(16, 16) / 255) ** 1.5)) < 2.1


def test_a_grey_picture_may_have_a_profile_of_colours() -> None:
    grey = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    pixels = shown(saved(grey, "PNG", icc_profile=rgb_profile(SRGB, 1.5)))
    assert off_by(pixels[..., 0], srgb_level((np.arange(256).reshape(16, 16) / 255) ** 1.5)) < 2.1


@pytest.mark.parametrize("format", ["JPEG", "TIFF"])
def test_inks_are_what_their_profile_says(format: str) -> None:
    lightness = (50.0, 30.0, 80.0, 10.0)
    inks = np.zeros((8, 40, 4), np.uint8)
    for ink in range(4):
        inks[:, 8 * (ink + 1) : 8 * (ink + 2), ink] = 255
    options = {"quality": 100, "subsampling": 0} if format == "JPEG" else {}
    data = saved(Image.fromarray(inks, "CMYK"), format, icc_profile=cmyk_profile(lightness), **options)
    expected = [255.0, *map(grey_of_lightness, lightness)]
    assert off_by(shown(data)[4, 4::8], np.repeat(np.array(expected)[:, np.newaxis], 3, axis=1)) < 3


@pytest.mark.parametrize("mode", ["RGBA", "P"])
def test_colours_are_converted_before_they_lie_on_the_background(mode: str) -> None:
    image = Image.fromarray(picture(3)).convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    if mode == "P":
        image = image.quantize(64)
    data = saved(image, "PNG", icc_profile=ADOBE)
    rgba = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA")).astype(float)
    alpha = rgba[..., 3:] / 255
    expected = rgb_as_srgb(rgba[..., :3], ADOBE_RGB, GAMMA) * alpha + 255 * (1 - alpha)
    assert off_by(shown(data), expected) < 2.6
