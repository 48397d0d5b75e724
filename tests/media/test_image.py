import io
import struct
import sys
import time
from typing import Any

import hostile_images
import imagecodecs
import numpy as np
import pillow_heif
import pytest
from media_files import make_image, picture
from PIL import Image, ImageOps

from pipeline.errors import ItemError
from pipeline.media.image import _jpeg_pixels, decode_image
from pipeline.media.pillow import _missing_decoder
from pipeline.media.probe import probe_media
from pipeline.media.resize import resize_frames
from pipeline.schema import ImageRules


def saved(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def only_frame(data: bytes) -> np.ndarray:
    frames = decode_image(data, None)
    assert frames.pts_seconds == (0.0,)
    return frames.pixels[0]


PLAIN = [
    make_image("JPEG"),
    make_image("JPEG", progressive=True, quality=60),
    make_image("JPEG", "L"),
    make_image("JPEG", "CMYK"),
    make_image("PNG"),
    make_image("PNG", "L"),
    make_image("PNG", "1"),
    make_image("PNG", "P"),
    make_image("WEBP"),
    make_image("WEBP", lossless=True),
    make_image("GIF", "P"),
    make_image("BMP"),
    make_image("TIFF"),
    make_image("AVIF"),
    make_image("JPEG2000"),
]


@pytest.mark.parametrize("data", PLAIN, ids=range(len(PLAIN)))
def test_opaque_images_equal_pillows_own_conversion(data):
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(only_frame(data), expected)


def test_a_file_object_is_taken_and_left_open():
    file = io.BytesIO(make_image("PNG"))
    assert np.array_equal(decode_image(file, None).pixels[0], picture(3))
    assert not file.closed


def test_the_size_asked_for_is_that_of_resizing_the_full_picture():
    data = make_image("JPEG")
    full = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(decode_image(data, (28, 56)).pixels, resize_frames(full[np.newaxis], (28, 56)))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_exif_orientation_is_applied_and_the_probe_agrees(format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.fromarray(picture(3)), format, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    pixels = only_frame(data)
    assert np.array_equal(pixels, expected)
    assert pixels.shape[:2] == ((64, 96) if orientation < 5 else (96, 64))
    probe = probe_media(io.BytesIO(data), num_bytes=len(data), declared=None, name="x")
    assert (probe.height, probe.width) == pixels.shape[:2]


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_transparency_lies_on_white(format):
    rgba = np.dstack([picture(3), np.full((64, 96), 255, np.uint8)])
    rgba[:32, :, 3] = 0
    rgba[32:40, :, 3] = 128
    pixels = only_frame(saved(Image.fromarray(rgba), format, **({"lossless": True} if format == "WEBP" else {})))
    assert np.all(pixels[:32] == 255)
    half = picture(3)[32:40] * (128 / 255) + 255 * (127 / 255)
    assert np.abs(pixels[32:40] - half).max() <= 1
    assert np.array_equal(pixels[40:], picture(3)[40:])


def test_a_transparent_palette_entry_and_a_transparent_colour_lie_on_white():
    palette = Image.fromarray((np.arange(96 * 64).reshape(64, 96) % 4).astype(np.uint8), mode=None).convert("P")
    palette.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200, 9, 9, 9])
    pixels = only_frame(saved(palette, "PNG", transparency=1))
    assert [tuple(int(v) for v in p) for p in pixels[0, :4]] == [(200, 0, 0), (255, 255, 255), (0, 0, 200), (9, 9, 9)]
    colour = Image.new("RGB", (4, 4), (1, 2, 3))
    assert np.all(only_frame(saved(colour, "PNG", transparency=(1, 2, 3))) == 255)


def test_16_bit_grey_keeps_its_scale():
    grey = np.array([[0, 128, 257, 32768, 65278, 65535]], np.uint16)
    for format in ("PNG", "TIFF"):
        pixels = only_frame(saved(Image.fromarray(grey), format))
        assert pixels[0, :, 0].tolist() == [0, 0, 1, 128, 254, 255]


def test_float_pixels_are_refused_by_name():
    data = saved(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF")
    with pytest.raises(ItemError) as caught:
        decode_image(data, None)
    assert (caught.value.stage, caught.value.code) == ("decode", "unsupported_mode")


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_an_animation_shows_its_first_frame(format):
    frames = [Image.fromarray(np.full((8, 8, 3), value, np.uint8)) for value in (10, 200)]
    data = saved(
        frames[0], format, save_all=True, append_images=frames[1:], **({"lossless": True} if format == "WEBP" else {})
    )
    assert np.all(only_frame(data) == 10)


@pytest.mark.parametrize("fraction", [0.4, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_a_truncated_image_is_named_so(format, fraction):
    rng = np.random.default_rng(1)
    data = saved(Image.fromarray(rng.integers(0, 256, (200, 300, 3), dtype=np.uint8)), format)
    with pytest.raises(ItemError) as caught:
        decode_image(data[: int(len(data) * fraction)], None)
    assert (caught.value.stage, caught.value.code) == ("decode", "truncated")


@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_damaged_pixels_are_corrupt(format):
    rng = np.random.default_rng(1)
    data = bytearray(saved(Image.fromarray(rng.integers(0, 256, (200, 300, 3), dtype=np.uint8)), format))
    middle = len(data) // 2
    data[middle : middle + 200] = b"\xff" * 200
    with pytest.raises(ItemError) as caught:
        decode_image(bytes(data), None)
    assert (caught.value.stage, caught.value.code) == ("decode", "corrupt")


def test_text_is_no_image():
    with pytest.raises(ItemError) as caught:
        decode_image(b"BM, he said, and left the room without another word.", None)
    assert (caught.value.stage, caught.value.code) == ("decode", "unknown_format")


def photograph(width: int, height: int) -> Image.Image:
    """Smooth with some grain, as cameras take them."""
    noise = np.random.default_rng(7).integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    large = np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    grain = np.random.default_rng(8).integers(-6, 7, large.shape)
    return Image.fromarray((large + grain).clip(0, 255).astype(np.uint8))


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Root of the mean square, in levels."""
    assert found.shape == expected.shape and found.dtype == np.uint8
    return float(np.sqrt(((found.astype(float) - expected) ** 2).mean()))


@pytest.mark.parametrize(("size", "scaled"), [((150, 200), True), ((290, 390), True), ((301, 401), False)])
@pytest.mark.parametrize("orientation", [None, 6, 7])
def test_a_jpegs_decoder_scales_when_asked_and_not_below_the_size(
    size: tuple[int, int], scaled: bool, orientation: int | None
) -> None:
    image = photograph(800, 600)
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
        size = size[::-1]
    data = saved(image, "JPEG", quality=90, exif=exif)
    reference, fast = (decode_image(data, size, dct_scaled=flag).pixels for flag in (False, True))
    assert fast.shape == (1, *size, 3)
    assert (difference(fast, reference) > 0) is scaled
    assert difference(fast, reference) < 2.0
    # What is lost is little beside what a nearest-neighbour resize would lose.
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    nearest = np.asarray(upright.resize(size[::-1], Image.Resampling.NEAREST))[np.newaxis]
    assert difference(fast, reference) < 0.5 * difference(nearest, reference)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_other_decoders_do_not_scale(format: str) -> None:
    data = saved(photograph(800, 600), format)
    assert np.array_equal(decode_image(data, (75, 100), dct_scaled=True).pixels, decode_image(data, (75, 100)).pixels)


def test_a_cmyk_jpeg_is_scaled_too() -> None:
    data = saved(photograph(800, 600).convert("CMYK"), "JPEG", quality=90)
    assert difference(decode_image(data, (150, 200), dct_scaled=True).pixels, decode_image(data, (150, 200)).pixels) < 2


def test_a_truncated_jpeg_is_named_when_scaled() -> None:
    data = saved(photograph(800, 600), "JPEG", quality=90)
    with pytest.raises(ItemError, match="truncated"):
        decode_image(data[: len(data) // 2], (75, 100), dct_scaled=True)


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("size", [(1, 1), (17, 33), (640, 479)])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}, {"keep_rgb": True}])
def test_a_jpeg_that_skips_pillow_has_its_pixels(
    subsampling: str, size: tuple[int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if options == {"keep_rgb": True}:
        subsampling = "4:4:4"  # of RGB nothing is subsampled
    noise = np.random.default_rng(3).integers(0, 256, (size[0] // 8 + 1, size[1] // 8 + 1, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize(size[::-1], Image.Resampling.BICUBIC)
    data = saved(image, "JPEG", quality=83, subsampling=subsampling, **options)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", None)
    assert np.array_equal(only_frame(data), expected)
    assert np.array_equal(decode_image(Unbuffered(data), None).pixels[0], expected)


class Unbuffered(io.BufferedReader):
    """A file whose bytes are not in memory."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))  # type: ignore[arg-type]


def test_a_jpeg_with_a_fault_that_pillow_forgives_is_decoded() -> None:
    data = saved(photograph(160, 120), "JPEG", quality=90)
    scan = data.index(b"\xff\xda")
    faulty = data[:scan] + b"\0\0\0" + data[scan:]  # bytes that belong to nothing
    assert _jpeg_pixels(io.BytesIO(faulty), (160, 120), (160, 120)) is None
    assert np.array_equal(only_frame(faulty), np.asarray(Image.open(io.BytesIO(faulty)).convert("RGB")))


def test_a_jpeg_of_another_size_than_was_admitted_is_left_to_pillow() -> None:
    data = saved(photograph(160, 120), "JPEG")
    assert _jpeg_pixels(io.BytesIO(data), (160, 120), (160, 120)) is not None
    assert _jpeg_pixels(io.BytesIO(data), (120, 160), (120, 160)) is None


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": "4:4:4"}, {"subsampling": "4:2:2"}])
@pytest.mark.parametrize("least", [(75, 100), (76, 101), (120, 160), (31, 41), (599, 799)])
def test_a_scaled_jpeg_that_skips_pillow_has_its_pixels(
    least: tuple[int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = saved(photograph(800, 600), "JPEG", quality=88, **options)
    draft = Image.open(io.BytesIO(data))
    draft.draft("RGB", least[::-1])
    expected = resize_frames(np.asarray(draft.convert("RGB"))[np.newaxis], least)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", None)
    assert np.array_equal(decode_image(data, least, dct_scaled=True).pixels, expected)


@pytest.mark.parametrize("colorspace", ["CMYK", "YCCK"])
def test_inks_of_a_jpeg_become_colours(colorspace: str) -> None:
    inks = np.zeros((32, 64, 4), np.uint8)
    inks[:16, :32] = (255, 0, 0, 0)
    inks[16:, :32] = (0, 200, 100, 0)
    inks[:16, 32:] = (0, 0, 0, 255)
    # Adobe's files, and so Pillow's, hold what is left of white.
    left = 255 - inks
    data = imagecodecs.jpeg8_encode(left, level=100, colorspace="CMYK", outcolorspace=colorspace, subsampling="444")
    if colorspace == "CMYK":
        by_pillow = only_frame(saved(Image.fromarray(inks, "CMYK"), "JPEG", quality=100))
        assert difference(by_pillow, only_frame(data)) < 1
    expected = (left[..., :3].astype(float) * left[..., 3:] / 255).round()
    inside = np.s_[8::16, 16::32]  # of each of four fields: the encoder halves some resolutions
    assert np.abs(only_frame(data).astype(float) - expected)[inside].max() <= 3


def test_16_bit_colour_keeps_its_high_byte() -> None:
    rng = np.random.default_rng(2)
    colours = rng.integers(0, 65536, (20, 30, 3), dtype=np.uint16)
    tags = {
        **hostile_images.grey_tiff(30, 20),
        258: (hostile_images.SHORT, (16, 16, 16)),
        262: (hostile_images.SHORT, (2,)),
        277: (hostile_images.SHORT, (3,)),
        279: (hostile_images.LONG, (colours.nbytes,)),
    }
    for data in (imagecodecs.png_encode(colours), hostile_images.tiff(tags, colours.astype("<u2").tobytes())):
        assert np.array_equal(only_frame(data), colours >> 8)


def test_16_bit_grey_with_a_transparent_level() -> None:
    grey = np.array([[0, 1000, 65535]], np.uint16)
    pixels = only_frame(saved(Image.fromarray(grey), "PNG", transparency=1000))
    assert pixels[0, :, 0].tolist() == [0, 255, 255]


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_transparency_lies_on_the_background_of_the_rules(format: str) -> None:
    rgba = np.dstack([picture(3), np.full((64, 96), 255, np.uint8)])
    rgba[:32, :, 3] = 0
    rgba[32:40, :, 3] = 128
    data = saved(Image.fromarray(rgba), format, **({"lossless": True} if format == "WEBP" else {}))
    pixels = decode_image(data, None, rules=ImageRules(background="#102030")).pixels[0]
    assert np.all(pixels[:32] == (16, 32, 48))
    half = picture(3)[32:40] * (128 / 255) + np.array([16, 32, 48]) * (127 / 255)
    assert np.abs(pixels[32:40] - half).max() <= 1
    assert np.array_equal(pixels[40:], picture(3)[40:])


def bmp_with_alpha(rgba: np.ndarray) -> bytes:
    """A BMP with a header that names the masks of four channels (BITMAPV4HEADER)."""
    height, width = rgba.shape[:2]
    masks = (0xFF, 0xFF00, 0xFF0000, 0xFF000000)
    header = struct.pack("<IiiHHIIiiII4I", 108, width, -height, 1, 32, 3, rgba.nbytes, 0, 0, 0, 0, *masks)
    head = b"BM" + struct.pack("<IHHI", 14 + 108 + rgba.nbytes, 0, 0, 14 + 108)
    return head + header.ljust(108, b"\0") + rgba.tobytes()


def test_a_bmp_of_four_bytes_a_pixel_is_transparent_only_if_it_says_so_anywhere() -> None:
    rgba = np.dstack([picture(3), np.zeros((64, 96), np.uint8)])
    assert np.array_equal(only_frame(bmp_with_alpha(rgba)), picture(3))
    rgba[0, 0, 3] = 255
    pixels = only_frame(bmp_with_alpha(rgba))
    assert np.array_equal(pixels[0, 0], picture(3)[0, 0]) and np.all(pixels[1:] == 255)


@pytest.mark.parametrize(
    ("format", "options"),
    [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("PNG", {"transparent": True})],
)
def test_a_truncated_image_is_kept_in_part_when_the_rules_say_so(format: str, options: dict[str, Any]) -> None:
    image = photograph(320, 240)
    if options.pop("transparent", False):
        image.putalpha(255)
    data = saved(image, format, **options)
    cut = data[: len(data) // 2]
    with pytest.raises(ItemError, match="truncated"):
        decode_image(cut, None)
    pixels = decode_image(cut, None, rules=ImageRules(keep_truncated=True)).pixels[0]
    whole = only_frame(data)
    assert pixels.shape == whole.shape
    if options:  # the first scans of a progressive one are of the whole picture
        assert 0 < difference(pixels, whole) < 40
        return
    grey = np.all(np.abs(pixels.astype(int) - 128) <= 1, axis=(1, 2))
    same = np.all(pixels == whole, axis=(1, 2))
    assert same[:80].all() and grey[160:].all()
    # One row of blocks, and what is smoothed with it, is neither, the one where the file ends.
    assert (~(same | grey)).sum() <= 20
    with pytest.raises(ItemError, match="truncated"):  # the switch is back
        decode_image(cut, None)


def test_what_cannot_be_kept_in_part_is_truncated_still() -> None:
    data = saved(photograph(320, 240), "WEBP")
    with pytest.raises(ItemError, match="truncated"):
        decode_image(data[: len(data) // 2], None, rules=ImageRules(keep_truncated=True))


@pytest.mark.parametrize("rules", [ImageRules(), ImageRules(keep_truncated=True)])
def test_another_size_than_was_admitted_is_refused_before_it_is_decoded(rules: ImageRules) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for data in (make_image("PNG"), make_image("JPEG"), make_image("JPEG", exif=exif)):
        height, width = only_frame(data).shape[:2]
        assert decode_image(data, None, rules=rules, admitted=(height, width)).pixels.shape[1:3] == (height, width)
        with pytest.raises(ItemError) as caught:
            decode_image(data, None, rules=rules, admitted=(width, height))
        assert (caught.value.stage, caught.value.code) == ("decode", "wrong_size")


def heic(image: Image.Image, **options: object) -> bytes:
    pillow_heif.register_heif_opener()
    return saved(image, "HEIF", **options)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_heic_is_turned_once(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = heic(Image.fromarray(picture(3)), quality=95, chroma=444, exif=exif.tobytes())
    upright = Image.fromarray(picture(3))
    upright.getexif()[0x0112] = orientation
    expected = np.asarray(ImageOps.exif_transpose(upright))
    pixels = only_frame(data)
    probe = probe_media(io.BytesIO(data), num_bytes=len(data), declared="image", name="x")
    assert (probe.container, probe.height, probe.width) == ("heif", *expected.shape[:2])
    assert difference(pixels, expected) < 4


def test_what_a_heic_says_in_its_exif_alone_turns_nothing() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = heic(Image.fromarray(picture(3)), quality=95, chroma=444, exif=exif)
    assert b"Exif" in data and b"irot" not in data
    assert difference(only_frame(data), picture(3)) < 4


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_a_heic_of_each_mode(mode: str) -> None:
    image = Image.fromarray(picture(3)).convert(mode)
    if mode == "RGBA":
        image.putalpha(Image.fromarray(np.repeat([[0], [255]], 32, axis=0).astype(np.uint8) * np.ones(96, np.uint8)))
    expected = np.array(image.convert("RGB"))
    expected[:32] = 255 if mode == "RGBA" else expected[:32]
    assert difference(only_frame(heic(image, quality=95, chroma=444)), expected) < 4


@pytest.mark.parametrize(
    "call", [lambda d: probe_media(io.BytesIO(d), num_bytes=1, declared=None, name="a"), only_frame]
)
def test_a_heic_without_its_decoder_says_what_to_install(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = heic(Image.fromarray(picture(3)))
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    _missing_decoder.cache_clear()
    with pytest.raises(ItemError, match=r"headrace\[heic\]") as caught:
        call(data)
    assert caught.value.code == "unsupported_codec"
    _missing_decoder.cache_clear()


def test_a_jpeg_of_more_scans_than_anybody_writes_is_refused_before_it_is_decoded() -> None:
    assert decode_image(hostile_images.jpeg_of_scans(200), (8, 8)).pixels.shape == (1, 8, 8, 3)
    started = time.process_time()
    with pytest.raises(ItemError, match="5,000 scans") as caught:
        decode_image(hostile_images.jpeg_of_scans(5_000), (8, 8))
    assert caught.value.code == "corrupt"
    assert time.process_time() - started < 0.5  # 3 s to decode
