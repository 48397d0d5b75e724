"""The sizes of the pictures in an AVIF, read from their own headers."""

import io
import random

import numpy as np
import pytest
from PIL import Image

from pipeline.media.avif import coded_sizes


def saved(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "AVIF", **options)
    return file.getvalue()


@pytest.mark.parametrize("size", [(1, 1), (17, 33), (640, 480), (64, 4001)])
@pytest.mark.parametrize("options", [{}, {"subsampling": "4:4:4"}, {"codec": "aom", "autotiling": False}])
def test_the_picture_itself(size: tuple[int, int], options: dict[str, object]) -> None:
    assert coded_sizes(saved(Image.new("RGB", size, (1, 99, 200)), **options)) == [size]


def test_its_alpha_too() -> None:
    image = Image.new("RGB", (40, 30))
    image.putalpha(Image.linear_gradient("L").resize((40, 30)))
    sizes = coded_sizes(saved(image))
    assert len(sizes) >= 2 and set(sizes) == {(40, 30)}


def test_the_track_of_an_animation() -> None:
    frames = [Image.fromarray(np.full((48, 64, 3), level, np.uint8)) for level in (0, 90, 180)]
    sizes = coded_sizes(saved(frames[0], save_all=True, append_images=frames[1:]))
    assert sizes and set(sizes) == {(64, 48)}


def test_damage_and_cuts_give_a_list_or_a_value_error() -> None:
    data = saved(Image.new("RGB", (40, 30)))
    rng = random.Random(5)
    for number in range(2_000):
        damaged = bytearray(data[: rng.randrange(len(data))] if number % 2 else data)
        for _ in range(rng.choice((1, 3, 30))):
            if damaged:
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            assert isinstance(coded_sizes(bytes(damaged)), list)
        except ValueError:
            continue


def test_a_file_of_a_million_pictures_is_refused() -> None:
    items = b"\0\0\0\0" + b"\x44\0" + (60_000).to_bytes(2, "big") + (b"\0\1\0\0\0\1" + bytes(8)) * 60_000
    with pytest.raises(ValueError, match="more than"):
        coded_sizes((len(items) + 8).to_bytes(4, "big") + b"iloc" + items)
