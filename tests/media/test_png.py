"""PNGs decoded by libavcodec have Pillow's pixels, and whatever is wrong with one is left to Pillow."""

import io
import zlib

import av.logging
import hostile_images
import numpy as np
import pytest
from PIL import Image

from pipeline.media.image import decode_image
from pipeline.media.png import png_pixels

ROWS = np.random.default_rng(4).integers(1, 256, (20, 91), dtype=np.uint8)
ROWS[:, 0] = np.arange(20) % 5  # each kind of filter


def saved(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


@pytest.mark.parametrize("size", [(1, 1), (3, 200), (64, 64), (65, 63), (257, 129), (1216, 832)])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_the_pixels_are_pillows(size: tuple[int, int], mode: str) -> None:
    rng = np.random.default_rng(6)
    shape = (size[1], size[0], len(mode))
    for pixels in (rng.integers(0, 256, shape, dtype=np.uint8), np.full(shape, 77, np.uint8)):
        found = png_pixels(saved(Image.fromarray(pixels)), size)
        assert found is not None and np.array_equal(found, pixels)


def test_each_filter_and_no_filter() -> None:
    data = hostile_images.png(30, 20, pixels=ROWS.tobytes())
    found = png_pixels(data, (30, 20))
    assert found is not None
    assert np.array_equal(found, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "I;16"])
def test_other_modes_are_not_its_own(mode: str) -> None:
    image = Image.fromarray(np.zeros((8, 8), np.uint16)) if mode == "I;16" else Image.new(mode, (8, 8))
    assert png_pixels(saved(image), (8, 8)) is None


@pytest.mark.parametrize("missing", [1, 40, 90, 91, 92, 500, 1819])
def test_missing_rows_are_left_to_pillow_each_time(missing: int) -> None:
    data = hostile_images.png(30, 20, pixels=ROWS.tobytes()[:-missing])
    for _ in range(3):
        assert png_pixels(data, (30, 20)) is None


@pytest.mark.parametrize("level", [None, av.logging.FATAL])
def test_what_a_program_hears_of_libav_is_as_before(level: int | None) -> None:
    before = av.logging.get_level()
    av.logging.set_level(level)
    try:
        for missing in (0, 500):
            png_pixels(hostile_images.png(30, 20, pixels=ROWS.tobytes()[: 1820 - missing]), (30, 20))
            assert (av.logging.get_level(), av.logging.get_skip_repeated()) == (level, True)
    finally:
        av.logging.set_level(before)


def test_faults_and_other_sizes_are_left_to_pillow() -> None:
    data = hostile_images.png(30, 20, pixels=ROWS.tobytes())
    assert png_pixels(data, (30, 21)) is None
    assert png_pixels(data[:-12], (30, 20)) is None
    assert png_pixels(data[: len(data) // 2], (30, 20)) is None
    for at in (20, 40, 60, len(data) // 2, len(data) - 14):
        damaged = bytearray(data)
        damaged[at] ^= 4
        assert png_pixels(bytes(damaged), (30, 20)) is None, at
    compressed = zlib.compress(ROWS.tobytes())
    wrong = compressed[:-1] + bytes([compressed[-1] ^ 1])
    checked = data.replace(compressed, wrong).replace(
        zlib.crc32(b"IDAT" + compressed).to_bytes(4, "big"), zlib.crc32(b"IDAT" + wrong).to_bytes(4, "big")
    )
    assert checked != data and png_pixels(checked, (30, 20)) is None


def test_more_pixels_than_were_admitted_are_not_allocated() -> None:
    assert png_pixels(hostile_images.png(30_000, 30_000), (30, 20)) is None


@pytest.mark.parametrize("options", [{}, {"transparency": (1, 2, 3)}])
def test_what_pillow_knows_of_a_picture_stays_with_it(options: dict[str, object]) -> None:
    image = Image.new("RGB", (4, 4), (1, 2, 3))
    data = saved(image, **options)
    assert np.all(decode_image(data, None).pixels == (255 if options else (1, 2, 3)))
